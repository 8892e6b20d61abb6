"""End-to-end tests: real daemons, real sockets, real kills."""
