"""A local folder served as a storage with addresses such as `bucket://photos/1.png`."""

import contextlib
import threading

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Bucket(LocalFileSystem):
    """fsspec's local file system under another protocol; `reads` lists the files that were read."""

    protocol = "bucket"
    root = ""
    reads: list[str] = []
    fail = staticmethod(lambda path: None)
    """Called with each path that is requested."""

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path)
        below = path.removeprefix("bucket:").strip("/")
        return f"{cls.root}/{below}".rstrip("/") if path.startswith("bucket:") else path

    def ls(self, path, detail=False, **kwargs):
        self.fail(path)
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path, **kwargs):
        self.fail(str(path))
        return super().info(path, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.reads.append(path)
        self.fail(path)
        return super().cat_file(path, start, end, **kwargs)


@contextlib.contextmanager
def bucket(folder):
    """Serve a folder as `bucket://` while in this context."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    Bucket.root, Bucket.reads, Bucket.fail = str(folder), [], staticmethod(lambda path: None)
    yield Bucket


def in_flight(count, timeout):
    """A `fail` that lets no file return before `count` files have been requested."""
    barrier = threading.Barrier(count)
    return staticmethod(lambda path: path.endswith(".png") and barrier.wait(timeout))
