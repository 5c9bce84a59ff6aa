#!/usr/bin/env bash
# The only installer: makes .venv, installs the pinned packages, then starts what was asked for.
# Runs under bash 3.2 as well, which is what macOS ships.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
venv="$here/.venv"
python="$venv/bin/python"
stamp="$venv/.setup-stamp"            # what was installed: one line per part
kept_torch="$venv/.setup-torch-spec"  # a TORCH_SPEC given once holds until another one is given

say() { printf '%s\n' "$*"; }
die() { printf 'setup: %s\n' "$1" >&2; exit "${2:-1}"; }

usage() {
  cat <<'TEXT'
usage: bash setup.sh [install|gui|demo|toys|test|doctor] [arguments]

  install           make .venv and install what the product needs (the default); quick when nothing changed
  install --dry_run say which Python and which torch would be taken, and change nothing
  gui [...]         install if needed, then open the studio; arguments go to gui.py
  demo [...]        install if needed, then train a LoRA on the built-in toy base and write before_after.png
  toys [FAMILY ...] install if needed, then train what the toy presets teach and write docs/toys.md, with grids and figures
  test [...]        install with the test extras, then run style, types and tests; further arguments go to pytest.
                    --all instead runs every test, those that take minutes too, a folder at a time; --busy runs each
                    folder ten times while two other processes compute; --mutants puts known faults into copies of
                    the program and says which of them the tests notice. These three go on where they were stopped
  doctor [...]      say what is installed, which devices there are, and what will not work

environment:
  PYTHON      the Python that makes .venv, 3.11 to 3.13; found by itself otherwise
  TORCH_SPEC  arguments of pip that install torch, for another build or version, for example
              TORCH_SPEC="torch==2.13.0 --index-url ADDRESS" with the address that pytorch.org shows for your
              system (CPU only, another CUDA, ROCm). It is remembered for later calls.
TEXT
}

# --- Python ---------------------------------------------------------------------------------------------------------

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null; }

suits() {
  case "$(version_of "$1" || true)" in
    3.11.* | 3.12.* | 3.13.*) return 0 ;;
    *) return 1 ;;
  esac
}

find_python() {
  local name version
  if [ -n "${PYTHON:-}" ]; then
    version="$(version_of "$PYTHON" || true)"
    [ -n "$version" ] || die "PYTHON=$PYTHON does not start; give the path of a Python 3.11, 3.12 or 3.13."
    suits "$PYTHON" || die "PYTHON=$PYTHON is Python $version; 3.11, 3.12 or 3.13 is needed."
    say "$PYTHON"
    return
  fi
  for name in python3 python3.12 python3.13 python3.11 python; do
    if command -v "$name" >/dev/null && suits "$name"; then
      say "$name"
      return
    fi
  done
  version="$(version_of python3 || true)"
  die "no Python 3.11, 3.12 or 3.13 found (python3 is ${version:-missing}); install one, or give its path: PYTHON=/path/to/python3.12 bash setup.sh"
}

make_venv() {
  local base version
  if version="$(version_of "$python")" && [ -n "$version" ]; then
    suits "$python" || die ".venv has Python $version; 3.11, 3.12 or 3.13 is needed. Delete the folder .venv and run this again."
    if [ -n "${PYTHON:-}" ]; then
      base="$(find_python)"
      [ "$(version_of "$base")" = "$version" ] ||
        die ".venv has Python $version and PYTHON=$PYTHON is $(version_of "$base"); delete the folder .venv to change, or leave PYTHON unset."
    fi
  else
    base="$(find_python)"
    say "Making .venv with Python $(version_of "$base")."
    # --clear: what is there, if anything, does not start.
    "$base" -m venv --clear "$venv" ||
      die "this Python cannot make a virtual environment; on Debian and Ubuntu install the package python3-venv."
  fi
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip --upgrade >/dev/null ||
    die ".venv has no pip and cannot get it; on Debian and Ubuntu install python3-venv, delete the folder .venv and run this again."
}

# --- torch ----------------------------------------------------------------------------------------------------------

default_torch() { sed -n 's/^\(torch==[^ #;]*\).*/\1/p' "$here/requirements.txt"; }

torch_spec() {
  if [ -n "${TORCH_SPEC:-}" ]; then
    say "$TORCH_SPEC"
  elif [ -s "$kept_torch" ]; then
    cat "$kept_torch"
  else
    default_torch
  fi
}

device() {
  if [ "$(uname -s)" = Darwin ]; then
    if [ "$(uname -m)" = arm64 ]; then say macos; else say macos-intel; fi
  elif { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; } || [ -x /usr/lib/wsl/lib/nvidia-smi ]; then
    say cuda
  elif command -v rocminfo >/dev/null || [ -d "${ROCM_PATH:-/opt/rocm}" ]; then
    say rocm
  else
    say cpu
  fi
}

explain_torch() {
  local spec="$1"
  if [ -n "${TORCH_SPEC:-}" ]; then
    say "Taking '$spec', because TORCH_SPEC says so."
    return
  elif [ -s "$kept_torch" ]; then
    say "Taking '$spec', because TORCH_SPEC said so when .venv was made."
    return
  fi
  case "$(device)" in
    cuda) say "Taking $spec, because an NVIDIA driver answers and the standard build for Linux brings CUDA." ;;
    rocm) say "Taking $spec, which will use the CPU only: ROCm is here, but its build of torch is not the standard one. For the GPU run: TORCH_SPEC=\"$spec --index-url ADDRESS\" bash setup.sh install, with the address that pytorch.org shows for ROCm." ;;
    macos) say "Taking $spec, because the standard build for macOS uses the Apple GPU." ;;
    macos-intel) say "Taking $spec; torch has ended its builds for Intel Macs, so this will probably not be found." ;;
    cpu) say "Taking $spec, because no GPU is found. The standard build for Linux carries CUDA, several GB; for the small one run: TORCH_SPEC=\"$spec --index-url ADDRESS\" bash setup.sh install, with the address that pytorch.org shows for CPU." ;;
  esac
}

installed_torch() {
  "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

# --- packages -------------------------------------------------------------------------------------------------------

pip_install() { "$python" -m pip install --disable-pip-version-check --no-input "$@"; }

fingerprint() {  # NAME of a requirement file -> one line that changes when anything it depends on does
  say "$1 $(cksum <"$here/$1") python $(version_of "$python") $(torch_spec)"
}

is_installed() { [ -f "$stamp" ] && grep -qxF -- "$(fingerprint "$1")" "$stamp"; }

mark_installed() {
  local line
  line="$(fingerprint "$1")"
  { if [ -f "$stamp" ]; then grep -v -- "^$1 " "$stamp" || true; fi; say "$line"; } >"$stamp.new"
  mv -f "$stamp.new" "$stamp"
}

install_torch() {
  local spec have words reinstall=""
  spec="$(torch_spec)"
  have="$(installed_torch)"
  explain_torch "$spec"
  # The same version of another build satisfies pip, so a changed TORCH_SPEC has to be forced.
  if [ -n "$have" ] && [ -n "${TORCH_SPEC:-}" ] && [ "$TORCH_SPEC" != "$(cat "$kept_torch" 2>/dev/null || default_torch)" ]; then
    reinstall=--force-reinstall
  fi
  read -r -a words <<<"$spec"
  pip_install ${reinstall:+"$reinstall"} "${words[@]}" ||
    die "pip could not install '$spec'; the lines above say why. Run the same command again to go on."
  if [ -n "${TORCH_SPEC:-}" ]; then
    if [ "$TORCH_SPEC" = "$(default_torch)" ]; then rm -f "$kept_torch"; else say "$TORCH_SPEC" >"$kept_torch"; fi
  fi
}

install_file() {  # everything in a requirement file except torch, which is held at the version that is there
  local have
  have="$(installed_torch)"
  [ -n "$have" ] || die "torch is not installed although pip said so; TORCH_SPEC must name torch."
  say "torch==$have" >"$venv/.setup-constraint.txt"
  sed '/^torch==/d' "$here/$1" >"$venv/.setup-$1"
  pip_install -r "$venv/.setup-$1" -c "$venv/.setup-constraint.txt"
}

install() {
  local file changed=""
  make_venv
  for file in requirements.txt "$@"; do
    if ! is_installed "$file"; then
      if [ "$file" = requirements.txt ]; then install_torch; fi
      install_file "$file" || die "pip could not install $file; the lines above say why. Run the same command again to go on."
      mark_installed "$file"
      changed=yes
    fi
  done
  if [ -n "$changed" ]; then say "Installed in $venv."; else say "Everything is installed, nothing to do."; fi
}

install_node_tools() {  # what checks the page's modules; without node the tests say that they are skipped
  local folder="$here/tests/js" lock
  if [ ! -f "$folder/package-lock.json" ]; then return; fi
  if ! command -v npm >/dev/null; then
    say "There is no node; the page's modules are not checked."
    return
  fi
  lock="$(cksum <"$folder/package-lock.json")"
  if [ "$(cat "$folder/node_modules/.setup-stamp" 2>/dev/null || true)" = "$lock" ]; then return; fi
  if (cd -- "$folder" && npm ci --engine-strict --no-audit --no-fund); then
    say "$lock" >"$folder/node_modules/.setup-stamp"
  else
    rm -rf "$folder/node_modules"
    say "npm could not install what checks the page's modules; the lines above say why. They are not checked."
  fi
}

explain() {
  local version
  if version="$(version_of "$python")" && [ -n "$version" ]; then
    say "Python $version of .venv is used."
  else
    version="$(find_python)"
    say "Python $(version_of "$version") ($version) would make .venv."
  fi
  explain_torch "$(torch_spec)"
}

# --- what runs ------------------------------------------------------------------------------------------------------

case "$(uname -s)" in
  MINGW* | MSYS* | CYGWIN*) die "on Windows use the twin of this file: powershell -ExecutionPolicy Bypass -File setup.ps1" ;;
esac

command="${1:-install}"
if [ "$#" -gt 0 ]; then shift; fi

case "$command" in
  -h | --help | help) usage ;;
  install)
    case "${1:-}" in
      "") install ;;
      --dry_run) explain ;;
      *) die "install does not know '$1'; it knows --dry_run." 2 ;;
    esac
    ;;
  gui)
    install
    exec "$python" "$here/gui.py" "$@"
    ;;
  demo)
    install
    cd -- "$here"
    exec "$python" -m sd_scripts.toy.demo "$@"
    ;;
  toys)
    install
    cd -- "$here"
    exec "$python" -m sd_scripts.toy.gallery "$@"
    ;;
  test)
    install requirements-test.txt
    install_node_tools
    cd -- "$here"
    exec "$python" -m tests "$@"
    ;;
  doctor)
    [ -x "$python" ] || die "nothing is installed yet; run: bash setup.sh install"
    cd -- "$here"
    exec "$python" -m sd_scripts.doctor "$@"
    ;;
  *) die "'$command' is not a sub-command; they are install, gui, demo, toys, test and doctor (bash setup.sh --help)." 2 ;;
esac
