#!/usr/bin/env bash
# Tests on 64-bit Arm: in a chroot under qemu, or as they are on a machine that is one. `make test-arm` calls it.
#   arm.sh FOLDER TORCH [pytest's arguments]     FOLDER: of the chroot, made where it is missing
# Needs Linux, root, debootstrap and qemu-user-static. Addresses above 2^47 have a test that needs no Arm: tests/emulator/test_memory.py.
set -euo pipefail
ROOT=$1 TORCH=$2
shift 2
PYTHON=.venv/bin/python
SUITE=bookworm VERSION=3.11
if [ "$(uname -m)" = aarch64 ]; then
  exec "$PYTHON" -m pytest "$@"
fi
cannot() {
  echo "make test-arm: $1; tests/emulator/test_memory.py has what needs no Arm" >&2
  exit 2
}
[ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] || cannot "needs root on Linux, for a chroot"
command -v debootstrap >/dev/null || cannot "needs debootstrap (apt install debootstrap)"
QEMU=$(command -v qemu-aarch64-static) || cannot "needs qemu-aarch64-static (apt install qemu-user-static)"

BINFMT=/proc/sys/fs/binfmt_misc
if [ ! -e $BINFMT/qemu-aarch64 ]; then
  [ -e $BINFMT/register ] || mount -t binfmt_misc none $BINFMT || cannot "the kernel has no binfmt_misc"
  MAGIC='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
  MASK='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
  echo ":qemu-aarch64:M::$MAGIC:$MASK:$QEMU:F" >$BINFMT/register
fi

SITE=/opt/site
if [ ! -e "$ROOT/made" ]; then
  if [ ! -x "$ROOT/usr/bin/python3" ] || [ -d "$ROOT/debootstrap" ]; then
    debootstrap --arch=arm64 --variant=minbase --include=python3,python3-dev,gcc,libc6-dev $SUITE "$ROOT"
  fi
  # Downloaded by this machine's pip, which is faster than one under qemu.
  "$PYTHON" - <<'PY' >"$ROOT/requirements.txt"
from importlib.metadata import requires
for line in requires("nvfp4-cute"):
    name, _, marker = line.partition(";")
    if not name.startswith(("nvfp4-cute", "torch")) and (not marker or 'extra == "test"' in marker or 'extra == "ffi"' in marker):
        print(name.strip())
PY
  PLATFORMS=(manylinux2014_aarch64 manylinux_2_17_aarch64 manylinux_2_26_aarch64 manylinux_2_27_aarch64 manylinux_2_28_aarch64
    manylinux_2_34_aarch64)
  FOR_ARM=(--target "$ROOT$SITE" --python-version $VERSION --only-binary=:all: "${PLATFORMS[@]/#/--platform=}")
  # pip asks this machine's processor which of torch's requirements there are: those for x86-64 are gigabytes of CUDA.
  "$PYTHON" -m pip install "${FOR_ARM[@]}" --no-deps "$TORCH"
  "$PYTHON" -m pip install "${FOR_ARM[@]}" -r "$ROOT/requirements.txt" filelock typing-extensions sympy networkx jinja2 fsspec
  # From a file of paths, so that those in it are found, too.
  printf 'import site; site.addsitedir("%s")\n/src\n' $SITE >"$ROOT/usr/lib/python3/dist-packages/zz_site.pth"
  touch "$ROOT/made"
fi

rm -rf "$ROOT/src" && mkdir "$ROOT/src"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- -c | tar -x -C "$ROOT/src"
cp -r "$("$PYTHON" -c 'import importlib.metadata as m; print(m.distribution("nvfp4-cute")._path)')" "$ROOT/src/"
for folder in kernels problems bench; do
  ln -s "../$folder" "$ROOT/src/nvfp4_cute/$folder"
done
# Mounts are of this process alone: `make clean` in between must not reach /dev.
unshare --mount sh -ec '
  root=$1
  shift
  mount --bind /proc "$root/proc"
  mount --bind /dev "$root/dev"
  exec chroot "$root" "$@"
' sh "$ROOT" /bin/sh -ec '
  cd /src/nvfp4_cute/emulator/fronts
  suffix=$(python3 -c "import sysconfig; print(sysconfig.get_config_var(\"EXT_SUFFIX\"))")
  gcc -shared -fPIC -O2 $(python3-config --includes) -o _launch_shim$suffix launch_shim.c -ldl
  cd /src
  exec env HOME=/root PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -p no:cacheprovider "$@"
' sh "$@"
