"""Files appear complete, locks end with their process, and errors about lesser storage suggest a remedy."""

import errno
import fcntl
import json
import mmap
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import models
from data import files
from data.errors import ConfigError, StorageError
from data.storage import Folder
from jobs.ownership import Lease, claim_attempt
from models.weights.files import write_tensors
from tests.support import hosts

pytestmark = pytest.mark.quick


def test_file_appears_completely_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "file.json"
    files.write_atomically(path, "old")
    with pytest.raises(RuntimeError), files.atomic_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("the writer fails half way")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.json"]
    files.write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file.json"]


@pytest.mark.parametrize(
    ("appear_at", "sizes", "is_patient", "unseen", "waited"),
    [
        (0.0, {"a": 3, "b": 1}, True, {}, 0.0),
        (25.0, {"a": 3, "b": 1}, True, {}, 25.0),
        (25.0, {"a": 3, "b": 1}, False, {"a": None, "b": None}, 0.0),
        (31.0, {"a": 3, "b": 1}, True, {"a": None, "b": None}, 30.0),
        (0.0, {"a": 2, "b": 1}, True, {"a": 2}, 30.0),
        (0.0, {"a": 3, "c": 1}, True, {"b": None}, 30.0),
    ],
)
def test_files_of_another_node_are_waited_for(appear_at, sizes, is_patient, unseen, waited, monkeypatch) -> None:
    """Simulates a machine ten seconds after its start, with a fake clock."""
    seconds = [10.0]

    def sleep(pause: float) -> None:
        seconds[0] += pause

    def seen() -> dict[str, int]:
        return sizes if seconds[0] >= 10.0 + appear_at - 1e-6 else {}

    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep))
    left, waited_s = files.wait_until_seen(seen, {"a": 3, "b": None}, is_patient=is_patient)
    assert left == unseen
    assert waited_s == pytest.approx(waited, abs=0.11)


def test_every_file_has_the_mode_that_the_umask_gives(tmp_path) -> None:
    previous = os.umask(0o027)
    try:
        model = models.build("mu/8", 16, 5)
        models.save(model, tmp_path / "weights", writing=files.atomic_file)
        files.write_atomically(tmp_path / "weights/record.json", "{}")
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "weights").iterdir()}
    assert modes == {"weights.safetensors": 0o640, "model.json": 0o640, "record.json": 0o640}


def test_disk_error_names_the_weights_file(tmp_path) -> None:
    path = tmp_path / "missing" / "weights.safetensors"
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{path}'"):
        write_tensors(path, {"a": torch.zeros(3)}, nullcontext)


def test_small_file_reserves_space_for_a_write_on_a_full_disk(tmp_path, monkeypatch) -> None:
    path = tmp_path / "status.json"
    files.write_with_reserve(path, '{"message": "running"}', 100)
    size = path.stat().st_size
    monkeypatch.setattr(os, "rename", refusing(os.rename, errno.ENOSPC, lambda *_: True))
    files.write_with_reserve(path, '{"message": "the disk is full"}', 100)
    assert json.loads(path.read_text()) == {"message": "the disk is full"}
    assert path.stat().st_size == size
    with pytest.raises(OSError, match="No space left"):
        files.write_with_reserve(path, "x" * (size + 1), 100)
    assert json.loads(path.read_text()) == {"message": "the disk is full"}
    assert os.listdir(tmp_path) == ["status.json"]


@pytest.mark.parametrize("offset", [0, 8], ids=["aligned", "not-aligned"])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 4096, 12_345])
def test_large_file_is_written_completely_for_any_alignment_in_memory(beyond, offset, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "LARGE", 1 << 16)
    monkeypatch.setattr(files, "AT_ONCE", 1 << 14)
    size = (1 << 16) + beyond
    memory = mmap.mmap(-1, size + offset)  # begins with a page
    memory[offset:] = content = os.urandom(size)
    (tmp_path / "file").write_bytes(b"longer" * size)
    files.write_durably(tmp_path / "file", memoryview(memory)[offset:])
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT, errno.ENOSPC])
@pytest.mark.parametrize("at", [0, 2])
def test_failed_direct_writes_fall_back_to_normal_ones_and_a_full_disk_is_named(
    code, at, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(files, "LARGE", 1 << 16)
    monkeypatch.setattr(files, "AT_ONCE", 1 << 14)
    calls: list[int] = []
    write = os.write

    def refuse(handle: int, content: memoryview) -> int:
        calls.append(len(content))
        if len(calls) > at:
            raise OSError(code, os.strerror(code))
        return write(handle, content)

    monkeypatch.setattr(os, "write", refuse)
    memory = mmap.mmap(-1, 1 << 17)
    memory[:] = content = os.urandom(1 << 17)
    if code == errno.ENOSPC:
        with pytest.raises(OSError) as refused:
            files.write_durably(tmp_path / "file", memoryview(memory))
        assert str(tmp_path / "file (131.1 kB needed, ") in files.error_text(refused.value)
    else:
        files.write_durably(tmp_path / "file", memoryview(memory))
        assert (tmp_path / "file").read_bytes() == content
    assert len(calls) == at + 1


def test_a_run_directory_that_is_a_file_is_named(tmp_path) -> None:
    (tmp_path / "run").write_text("")
    for run in (tmp_path / "run", tmp_path / "run" / "digits"):
        with (
            pytest.raises(ConfigError, match=f"{tmp_path}/run is a file\n  expected a run directory"),
            Lease(Folder(run), print),
        ):
            pass


def refusing(call, code: int, refused):
    """Wrap `call` so that it raises an OSError for the arguments chosen by `refused`."""

    def refuse(*arguments):
        if refused(*arguments):
            raise OSError(code, os.strerror(code))
        return call(*arguments)

    return refuse


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_files_can_be_written_without_support_for_folder_sync(code, tmp_path, monkeypatch) -> None:
    def is_folder(handle: int) -> bool:
        return stat.S_ISDIR(os.fstat(handle).st_mode)

    monkeypatch.setattr(os, "fsync", refusing(os.fsync, code, is_folder))
    files.write_atomically(tmp_path / "file", "content")
    files.make_folder(tmp_path / "a" / "b", tmp_path)
    assert claim_attempt(Folder(tmp_path)) == 1
    assert (tmp_path / "file").read_text() == "content"


def test_a_disk_that_cannot_sync_a_file_is_an_error(tmp_path, monkeypatch) -> None:
    def is_file(handle: int) -> bool:
        return stat.S_ISREG(os.fstat(handle).st_mode)

    monkeypatch.setattr(os, "fsync", refusing(os.fsync, errno.EIO, is_file))
    with pytest.raises(OSError, match="Input/output error"):
        files.write_atomically(tmp_path / "file", "content")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_error_for_storage_without_locks_has_its_path_and_a_remedy(code, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refusing(fcntl.flock, code, lambda *_: True))
    no_locks = r"the file system of .* has no locks \(flock\)"
    with pytest.raises(StorageError, match=no_locks) as refusal, files.locked(tmp_path / "lock"):
        pass
    assert str(tmp_path) in str(refusal.value)
    assert "PATCHLINE_CACHE" in str(refusal.value)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_error_for_storage_without_hard_links_has_its_path_and_a_remedy(code, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "link", refusing(os.link, code, lambda *_: True))
    with pytest.raises(StorageError, match="has no hard links") as refusal:
        claim_attempt(Folder(tmp_path))
    assert str(tmp_path) in str(refusal.value)
    assert "run=/elsewhere" in str(refusal.value)


def test_link_or_rename_repeated_by_nfs_after_a_lost_response_succeeds(tmp_path, monkeypatch) -> None:
    """The kernel reports a request executed twice by the server as EEXIST for a link and ENOENT for a rename."""
    link, rename = os.link, os.rename

    def link_again(source, target) -> None:
        link(source, target)
        link(source, target)

    def rename_again(source, target) -> None:
        rename(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "link", link_again)
    monkeypatch.setattr(os, "rename", rename_again)
    storage = Folder(tmp_path)
    assert claim_attempt(storage) == 1
    assert claim_attempt(storage) == 2
    assert storage.create_once("attempts/000002.json", b"another's") is False
    storage.put("status.json", b"old")
    storage.put("status.json", b"new")
    assert storage.read("status.json") == b"new"
    (tmp_path / "saved").mkdir()
    storage.write(
        f"{storage.staging_name('saved', 'step-0000000005', 1)}/rank-00000.safetensors", memoryview(b"weights")
    )
    assert storage.publish("saved", "step-0000000005", 1, b"manifest")
    assert storage.published("saved") == ["step-0000000005"]
    assert storage.delete_set("saved", "step-0000000005") is None
    assert storage.published("saved") == []
    with pytest.raises(FileNotFoundError):
        files.rename(tmp_path / "missing", tmp_path / "status.json")
    assert not list(tmp_path.rglob(".tmp-*"))


CREATE = """
import sys, time
from pathlib import Path
from data.files import create_exclusively
while not Path("go").exists():
    time.sleep(0.001)
for number in range(200):
    print(create_exclusively(Path(f"{number}.json"), sys.argv[1]))
"""


@pytest.mark.skipif(hosts.missing() != "", reason=hosts.missing())
def test_two_processes_of_one_pid_on_shared_storage_create_each_name_once(tmp_path) -> None:
    """As the first processes of two pods: both have pid 1 in their own namespaces."""
    alone = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", CREATE]
    processes = {}
    for name in "ab":
        processes[name] = subprocess.Popen(
            [*alone, name], cwd=tmp_path, env=os.environ | {"PYTHONPATH": files.import_path()}, stdout=subprocess.PIPE
        )
    (tmp_path / "go").touch()
    created = {name: process.communicate(timeout=60)[0].split() for name, process in processes.items()}
    for number, answers in enumerate(zip(created["a"], created["b"], strict=True)):
        assert sorted(answers) == [b"False", b"True"]
        assert (tmp_path / f"{number}.json").read_text() == "ab"[answers.index(b"True")]


def test_swept_save_is_never_published_even_if_its_folder_cannot_be_deleted(tmp_path, monkeypatch):
    """NFS keeps a folder while a process on the same host has a file in it open."""
    storage = Folder(tmp_path)
    (tmp_path / "saved").mkdir()
    staged = storage.staging_name("saved", "step-0000000005", 1)
    storage.write(f"{staged}/rank-00000.safetensors", memoryview(b"weights"))
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    for attempt in (2, 3):
        storage.sweep("saved", attempt)
        assert not (tmp_path / staged).exists()
        with pytest.raises(FileNotFoundError):
            storage.publish("saved", "step-0000000005", 1, b"manifest")
    monkeypatch.undo()
    storage.sweep("saved", 4)
    assert os.listdir(tmp_path / "saved") == []


def hold(path: Path, is_held) -> None:
    """Take a lock, announce it, and never release it."""
    with files.locked(path):
        is_held.set()
        time.sleep(60)


def test_a_lock_is_free_the_moment_its_process_is_killed(tmp_path) -> None:
    context = multiprocessing.get_context("spawn")
    is_held = context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "lock", is_held))
    holder.start()
    assert is_held.wait(60)
    with open(tmp_path / "lock", "a") as file:
        assert not files.take_lock(file.fileno(), tmp_path / "lock", wait=False)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with open(tmp_path / "lock", "a") as file:
        assert files.take_lock(file.fileno(), tmp_path / "lock", wait=False)


def test_only_one_creates_a_file_exclusively(tmp_path) -> None:
    assert files.create_exclusively(tmp_path / "000001.json", "first")
    assert not files.create_exclusively(tmp_path / "000001.json", "second")
    assert (tmp_path / "000001.json").read_text() == "first"
    assert os.listdir(tmp_path) == ["000001.json"]


def test_a_new_process_finds_the_repository_first_and_keeps_the_folders_of_its_parent(monkeypatch) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", f"/carried{os.pathsep}/more")
    assert files.import_path().split(os.pathsep) == [root, "/carried", "/more"]
    monkeypatch.setenv("PYTHONPATH", "")
    assert files.import_path() == root


def test_no_module_replaces_the_import_path_of_a_new_process() -> None:
    """A machine may have its packages in a folder that is only in PYTHONPATH."""
    root = Path(__file__).parents[2]
    replaced = '"PYTHONPATH": ' + "str("
    for folder in ("data", "models", "pipeline", "jobs", "tests"):
        for path in (root / folder).rglob("*.py"):
            assert replaced not in path.read_text(), path


def make_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def make_dangling_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("created-by-the-attack"))


def make_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path, victim: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize("mode", ["a", "a+b", "rb"])
@pytest.mark.parametrize("attack", [make_link, make_dangling_link, make_pipe, make_socket])
def test_planted_link_pipe_or_socket_is_refused_without_following_or_waiting(attack, mode, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    planted = tmp_path / "lock"
    attack(planted, victim)
    with pytest.raises(StorageError, match="expected a regular file"), open(planted, mode, opener=files.open_regular):
        pass
    assert victim.read_text() == "precious"
    assert not (tmp_path / "created-by-the-attack").exists()


@pytest.mark.parametrize("attack", [make_link, make_dangling_link, make_pipe])
def test_lock_is_never_taken_through_a_planted_name(attack, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    attack(tmp_path / "lock", victim)
    with pytest.raises(StorageError, match="ls -l"), files.locked(tmp_path / "lock"):
        pass
    assert victim.read_text() == "precious"


def test_lock_keeps_the_content_of_an_existing_file(tmp_path) -> None:
    (tmp_path / "lock").write_text("kept")
    with files.locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_file_of_another_user_is_not_our_own(tmp_path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert files.is_own(path)
    os.chown(path, 65534, 65534)
    assert not files.is_own(path)


def test_link_and_missing_file_are_not_our_own(tmp_path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert not files.is_own(tmp_path / "link")
    assert not files.is_own(tmp_path / "missing")


def test_planted_link_in_a_folder_of_all_users_is_refused(tmp_path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "own").mkdir()
    (shared / "planted").symlink_to(tmp_path)
    for name in ("own", "missing"):
        files.refuse_planted(shared / name, "choose another")
    with pytest.raises(
        StorageError,
        match=r"planted: this is a link or belongs to another user(?s:.*)\n  expected a folder owned by this user",
    ):
        files.refuse_planted(shared / "planted", "choose another")
    # The user's own link in a private folder is intended.
    shared.chmod(0o755)
    files.refuse_planted(shared / "planted", "choose another")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_planted_folder_of_another_user_is_refused(tmp_path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 65534, 65534)
    with pytest.raises(StorageError, match="belongs to another user"):
        files.refuse_planted(tmp_path / "run", "choose another")


def test_error_without_a_home_folder_says_to_set_one(monkeypatch):
    for name in ("HOME", "PATCHLINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    program = "import os; from data import files; os.setuid(54321)\n{}"
    for call in ("files.state_folder()", "files.with_home('~/x')", "files.home()"):
        text = f"try: {call}\nexcept files.ConfigError as error: print(error)"
        done = subprocess.run([sys.executable, "-c", program.format(text)], capture_output=True, text=True)
        if "PermissionError" in done.stderr:
            pytest.skip("only root can become another user")
        assert "user 54321 has no home folder: HOME is not set" in done.stdout, done.stderr
        assert "run export HOME=/a/folder/of/this/user" in done.stdout
    monkeypatch.setenv("PATCHLINE_CACHE", "/caches")
    done = subprocess.run(
        [sys.executable, "-c", program.format("print(files.state_folder())")], capture_output=True, text=True
    )
    assert done.stdout == "/caches/patchline\n"
