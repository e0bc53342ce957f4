"""A cache folder with other users, other processes, and unrelated files. No kernel is compiled here."""

import json
import os
import resource
import shutil
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from nvfp4_cute.backends import emulator
from nvfp4_cute.compile import cache, compiler, disk_cache
from nvfp4_cute.compile.compiler import CompiledKernel
from nvfp4_cute.compile.entry_lock import locked, locked_if_free
from nvfp4_cute.compile.simt_keys import GemvKey
from nvfp4_cute.emulator import scratch
from nvfp4_cute.errors import CacheError

KEY, OTHER_KEY = GemvKey("sm_100a", torch.float16, False), GemvKey("sm_100a", torch.bfloat16, False)
STRANGER = 12345
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def compilations(monkeypatch):
    """Keys of compiled kernels, with a compiler that takes no time."""
    keys = []

    def compile_kernel(key):
        keys.append(key)
        return CompiledKernel(key, None, "ptx", b"cubin", b"object")

    def load_kernel(key, path, ptx, cubin):
        return CompiledKernel(key, None, ptx, cubin, Path(path).read_bytes())

    monkeypatch.setattr(disk_cache, "compile_kernel", compile_kernel)
    monkeypatch.setattr(disk_cache, "load_kernel", load_kernel)
    return keys


@pytest.fixture
def folder(tmp_path, compilations):
    """A cache folder with one entry."""
    disk_cache.fetch(tmp_path / "kernels", KEY)
    compilations.clear()
    return tmp_path / "kernels"


def entry_of(folder: Path) -> Path:
    (entry,) = disk_cache._entries(folder)
    return entry


# ---- processes -------------------------------------------------------------------------------------------------


@contextmanager
def forked(function=lambda: signal.pause()):
    """Starts a child that runs a function and exits. It is killed at the end of the block."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    with locked(tmp_path / "x.lock") as problem:
        assert problem is None
        forking = forked()
        forking.__enter__()
        with locked_if_free(tmp_path / "x.lock") as held:
            assert not held
    with locked_if_free(tmp_path / "x.lock") as held:
        assert held
    forking.__exit__(None, None, None)


def test_a_forked_child_does_not_keep_the_lock_of_a_parent_that_was_killed(tmp_path):
    reads, writes = os.pipe()

    def lock_and_die():
        with locked(tmp_path / "x.lock"):
            grandchild = os.fork()
            if grandchild == 0:
                time.sleep(0.1)  # time for its hooks
                os.write(writes, str(os.getpid()).encode())
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)

    with forked(lock_and_die):
        grandchild = int(os.read(reads, 20))
        with locked_if_free(tmp_path / "x.lock") as held:
            assert held
        os.kill(grandchild, signal.SIGKILL)


def test_a_child_leaves_the_block_that_it_was_forked_in(tmp_path):
    with locked(tmp_path / "x.lock"):
        child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_lock_that_its_holder_removed_is_taken_anew(tmp_path):
    lock, order = tmp_path / "x.lock", []

    def wait():
        with locked(lock):
            order.append("second")

    with locked(lock):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        lock.unlink()
        order.append("first")
    thread.join()
    assert order == ["first", "second"] and lock.exists()


@pytest.mark.parametrize("wait_s", [10.0, 0.1])
def test_a_child_that_is_forked_while_a_thread_compiles_gets_kernels(monkeypatch, tmp_path, wait_s):
    """The fork waits for the compilation, but with a limit."""
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", "off")
    monkeypatch.setattr(cache, "_kernels", {})
    monkeypatch.setattr(cache, "FORK_WAITS_S", wait_s)
    begun = threading.Event()

    def compile_kernel(key):
        begun.set()
        time.sleep(0.5 * (key == KEY))
        return CompiledKernel(key, None, "ptx", b"cubin", b"object")

    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    thread = threading.Thread(target=cache.get_kernel, args=(KEY,))
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        cache.get_kernel(OTHER_KEY)
        os._exit(0 if wait_s < 1 or (KEY, False) in cache._kernels else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.join()
    cache.get_kernel(OTHER_KEY)  # the parent's lock is free


def test_a_child_that_is_forked_while_a_thread_emulates_is_not_locked_out():
    begun, done = threading.Event(), threading.Event()

    def emulate():
        with emulator._one_at_a_time:
            begun.set()
            done.wait()

    thread = threading.Thread(target=emulate)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(not emulator._one_at_a_time.acquire(timeout=5))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    done.set()
    thread.join()


# ---- other users -----------------------------------------------------------------------------------------------


def give_away(path: Path, monkeypatch) -> None:
    """Makes a file belong to a user other than this one and root."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def forge(entry: Path) -> None:
    """Replaces an entry's object file by another one with a correct checksum."""
    (entry / disk_cache.OBJECT).write_bytes(b"forged")
    manifest = json.loads((entry / disk_cache.MANIFEST).read_bytes())
    manifest["sha256"][disk_cache.OBJECT] = sha256(b"forged").hexdigest()
    (entry / disk_cache.MANIFEST).write_text(json.dumps(manifest))


def open_to_all(path: Path, monkeypatch) -> None:
    path.chmod(0o777)


@pytest.mark.parametrize("expose", [give_away, open_to_all])
def test_a_folder_that_others_may_write_is_neither_loaded_from_nor_written(
    folder, compilations, monkeypatch, expose
):
    forge(entry_of(folder))
    expose(folder, monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"is not trusted .*(belongs to|every user may write).*CACHE_DIR"):
        assert disk_cache.fetch(folder, KEY).object_code == b"object"
    assert compilations == [KEY] and (entry_of(folder) / disk_cache.OBJECT).read_bytes() == b"forged"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give one file away")
@pytest.mark.parametrize("expose", [give_away, open_to_all])
@pytest.mark.parametrize(
    "part", [".", disk_cache.OBJECT, disk_cache.PTX, disk_cache.CUBIN, disk_cache.MANIFEST]
)
def test_an_entry_that_others_may_have_written_is_replaced(folder, compilations, monkeypatch, expose, part):
    forge(entry_of(folder))
    expose(entry_of(folder) / part, monkeypatch)
    with pytest.warns(RuntimeWarning, match=r"is not loaded.*(belongs to|every user may write)"):
        assert disk_cache.fetch(folder, KEY).object_code == b"object"
    assert disk_cache.fetch(folder, KEY).object_code == b"object" and compilations == [KEY]


def test_a_folder_like_tmp_serves_entries_of_ones_own(folder, compilations):
    folder.chmod(0o1777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        disk_cache.fetch(folder, KEY)
    assert compilations == []


def test_what_is_written_without_a_umask_is_trusted(tmp_path, compilations):
    before = os.umask(0)
    try:
        for _ in range(2):
            disk_cache.fetch(tmp_path / "kernels", KEY)
    finally:
        os.umask(before)
    assert compilations == [KEY]


# ---- unrelated files -------------------------------------------------------------------------------------------


def make_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "elsewhere")


@pytest.mark.parametrize("make", [os.mkfifo, make_link, os.mkdir])
@pytest.mark.parametrize(
    "place",
    [".", ".lock", ".partial", disk_cache.OBJECT, disk_cache.PTX, disk_cache.CUBIN, disk_cache.MANIFEST],
)
def test_a_strange_file_in_any_place_gives_way(folder, compilations, place, make):
    entry = entry_of(folder)
    path = entry / place if place[1:] not in ("lock", "partial") else entry.with_name(entry.name + place)
    if path == entry or place in (".lock", ".partial"):
        shutil.rmtree(entry)
    path.unlink(missing_ok=True)
    make(path)
    for _ in range(2):
        disk_cache.fetch(folder, KEY)
    assert compilations == [KEY] and not (folder / "elsewhere").exists()


def test_a_manifest_of_lists_in_lists_is_damaged(folder, compilations):
    (entry_of(folder) / disk_cache.MANIFEST).write_text("[" * 100_000)
    for _ in range(2):
        disk_cache.fetch(folder, KEY)
    assert compilations == [KEY]


# ---- leftovers -------------------------------------------------------------------------------------------------


def age(entry: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(entry / disk_cache.MANIFEST, (then, then))


def make_old_version(entry: Path) -> Path:
    """Copies an entry as other sources would have made it."""
    old = entry.with_name(entry.name[:-16] + "0" * 16)
    shutil.copytree(entry, old)
    manifest = json.loads((old / disk_cache.MANIFEST).read_bytes())
    manifest["identity"]["sources"] = "other"
    (old / disk_cache.MANIFEST).write_text(json.dumps(manifest))
    return old


def test_leftovers_are_not_counted_and_go_when_a_kernel_is_compiled(folder):
    entry = entry_of(folder)
    name = lambda digit: entry.name[:-16] + digit * 16
    partial, lock = folder / f"{name('1')}.partial", folder / f"{name('2')}.lock"
    shutil.copytree(entry, partial)
    lock.touch()
    busy = folder / f"{name('3')}.partial"
    busy.mkdir()
    assert disk_cache.contents(folder).num_entries == 1
    with locked(folder / f"{name('3')}.lock"):
        disk_cache.fetch(folder, OTHER_KEY)
    assert not partial.exists() and not lock.exists() and busy.exists()
    assert disk_cache.contents(folder).num_entries == 2


def test_files_of_others_in_the_folder_stay(folder):
    """The folder has other uses: lock files of package managers, downloads, old data with an entry.json."""
    others = [folder / "uv.lock", folder / "video.partial", folder / "nvfp4_sm_90.lock"]
    for path in others:
        path.write_text("theirs")
    data = folder / "nvfp4_data" / disk_cache.MANIFEST
    data.parent.mkdir()
    data.write_text("{}")
    age(data.parent, 1000)
    disk_cache.fetch(folder, OTHER_KEY)
    assert all(path.read_text() == "theirs" for path in others) and data.exists()
    assert disk_cache.contents(folder).num_entries == 2


@pytest.mark.parametrize(
    ("days", "is_old_version", "stays"), [(31, True, False), (29, True, True), (1000, False, True)]
)
def test_entries_of_other_versions_go_when_nobody_loads_them(folder, days, is_old_version, stays):
    entry = entry_of(folder)
    if is_old_version:
        entry = make_old_version(entry)
    age(entry, days)
    disk_cache.fetch(folder, OTHER_KEY)
    assert entry.exists() == stays


def test_loading_an_entry_says_that_it_is_used(folder, compilations):
    age(entry_of(folder), 1000)
    disk_cache.fetch(folder, KEY)
    assert compilations == [] and disk_cache._days_unused(entry_of(folder)) < 1


# ---- temporary files -------------------------------------------------------------------------------------------


def test_no_room_for_temporary_files_is_said_before_llvm_ends_the_process():
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, most))
    try:
        with pytest.raises(CacheError, match="needs 8 MiB for temporary files.*TMPDIR"):
            compiler.compile_kernel(KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    with scratch.folder() as name:
        assert not os.listdir(name)
