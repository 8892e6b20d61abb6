"""`kvd doctor`: what it finds, what it heals, and that a look changes nothing."""
