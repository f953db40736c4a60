"""Where a run keeps its files: a folder that all nodes see, or a bucket of an object store. One interface for both.

    storage = open_storage(Path("/runs/x"))                         `Folder`
    storage = open_storage(Path("/scratch/x"), "s3://bucket/x")     `Bucket`; the path is this node's own

Names are relative to the run, with "/" between their parts. Small files:
    storage.create_once("attempts/000007.json", b"{…}")   → True    False where the name is taken
    storage.put("status.json", b"{}")                               replaces what is there
    storage.read("status.json")                           → b"{}"   None where there is none
    storage.list("attempts")                              → {"attempts/000007.json": 41}, with bytes
    storage.delete(["status.json"])                                 what is not there is deleted already

A *set* is a folder of large files that appears at once, whole, or not at all: a checkpoint. It is named by step, and by
attempt where that is needed: step-0000001200, step-0000001200-000007. Its life, in order:
1. `staged` says under which name its files are written (`write`): no reader takes them for a set there;
2. `publish` makes it a set: its manifest is written last of all files. A folder is then renamed, a bucket creates the
   manifest only where no newer attempt has taken its name;
3. `published` lists the sets; `fetch_set` has the files of one on this node's disk;
4. `set_aside` keeps a bad one where no later attempt tries it; `retire` deletes an old one; `sweep` deletes what
   earlier attempts have left unpublished, and makes sure that none of it is published any more.
Neither a kill nor a power cut leaves half a set under a valid name.
A third kind of storage is a third class with the methods of `Folder`, and a line below.
"""

from pathlib import Path
from typing import TypeAlias

from data.bucket import Bucket
from data.folder import MANIFEST, SET_NAME, Folder

__all__ = ["MANIFEST", "SET_NAME", "Bucket", "Folder", "Storage", "open_storage"]

Storage: TypeAlias = Folder | Bucket


def open_storage(local: Path, url: str | None = None) -> Storage:
    """Return the storage of the run whose folder on this node is `local`, and whose URL is `url` if it has one."""
    return Folder(local) if url is None else Bucket(url, local)
