#!/bin/sh
# Installs Chromium for the tests of the gateway's page: on Debian, as root, with apt, when no browser is there.
# Never fails: where it cannot, it says why, and the tests skip with that reason (read from NOTE).
#
# usage: browser_deps.sh NOTE          NOTE is written when there is no browser afterwards, else removed
# Two of these at a time: the second waits for the first.

set -u
note=$1
release=${OS_RELEASE:-/etc/os-release}

has_browser() {
    for name in chromium chromium-browser google-chrome-stable google-chrome chrome; do
        command -v "$name" >/dev/null 2>&1 && return 0
    done
    [ -x "/Applications/Chromium.app/Contents/MacOS/Chromium" ] && return 0
    [ -x "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome" ]
}

give_up() {
    echo "$1" >"$note"
    echo "no browser: $1; the tests that need one are skipped" >&2
    exit 0
}

install_chromium() {
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -qq -y --no-install-recommends \
        -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2 chromium
}

mkdir -p "$(dirname "$note")"
if command -v flock >/dev/null 2>&1; then
    exec 9>"$note.lock"
    flock 9
fi
if has_browser; then
    rm -f "$note"
    exit 0
fi
# Ubuntu's package of that name is a stub that wants snapd
grep -qs '^ID=debian$' "$release" || give_up "install Chromium or Chrome, this is no Debian"
command -v apt-get >/dev/null 2>&1 || give_up "install Chromium or Chrome, there is no apt-get"
[ "$(id -u)" = 0 ] || give_up "apt install chromium needs root"
echo "installing chromium for the tests of the page" >&2
log="$note.log"
install_chromium >"$log" 2>&1 9>&- || {
    timeout 120 apt-get update -qq >>"$log" 2>&1 9>&- # a fresh image has no lists
    install_chromium >>"$log" 2>&1 9>&-
}
if has_browser; then
    rm -f "$note" "$log"
else
    give_up "apt install chromium failed: $(tail -n 1 "$log")"
fi
