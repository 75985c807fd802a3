#!/usr/bin/env bash
# install.sh            installs the official OpenAI clients for Python and Node, outside the clone; nothing is done twice
# install.sh python     the same for one of them, and prints the interpreter's path
# install.sh node       the same, and prints the folder that node is to be started in
#
# The versions are in requirements.txt and package.json. Everything lies in ${XDG_CACHE_HOME:-$HOME/.cache}/grapevine/clients,
# keyed by the content of these files and the version of the interpreter.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/grapevine/clients

key() { sha256sum "$1" | cut -c1-8; }

python() {
  local dir
  dir=$cache/python-$(python3 -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')-$(key "$here/requirements.txt")
  if [ ! -e "$dir/done" ]; then
    rm -rf "$dir"; python3 -m venv "$dir" >&2
    "$dir/bin/pip" -q install --disable-pip-version-check -r "$here/requirements.txt" >&2
    touch "$dir/done"
  fi
  echo "$dir/bin/python"
}

node() {
  local dir
  dir=$cache/node-$(command node --version)-$(key "$here/package.json")
  if [ ! -e "$dir/done" ]; then
    rm -rf "$dir"; mkdir -p "$dir"; cp "$here/package.json" "$dir/"
    (cd "$dir" && npm install --silent --no-audit --no-fund --no-package-lock) >&2
    touch "$dir/done"
  fi
  echo "$dir"
}

if [ $# -eq 0 ]; then python >/dev/null; node >/dev/null; else "$1"; fi
