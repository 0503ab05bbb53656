"""What a file is that is not what its name says: an error page, a Git LFS pointer, an archive. Imports no torch."""

import os
import re
from pathlib import Path

_PAGE = re.compile(rb"\s*<(!doctype\s|\?xml|!--|[a-z][\w:.-]*[\s/>])", re.IGNORECASE)
_MAGIC = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file it stands for: run `git lfs pull` where it is from",
    b"/annex/objects/": "is a git-annex pointer, not the file it stands for: run `git annex get` where it is from",
    b"\x1f\x8b": "is gzip-compressed: unpack it first",
    b"\x28\xb5\x2f\xfd": "is zstd-compressed: unpack it first",
    b"BZh": "is bzip2-compressed: unpack it first",
    b"\xfd7zXZ": "is xz-compressed: unpack it first",
    b"PK\x03\x04": "is a zip archive (or what torch.save writes)",
    b"%PDF": "is a PDF document",
    b"ARROW1": "is an Arrow file (preprocess_data.py reads it with --dataset FOLDER)",
    b"MMIDIDX": "is a Megatron index",
    b"\xff\xfe": "is UTF-16 text with a byte order mark: save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text with a byte order mark: save it as UTF-8",
    b"\xef\xbb\xbf": "begins with a byte order mark (BOM): save it as UTF-8 without one",
}


def foreign_content(head: bytes, binary: bool = False) -> str:
    """ ": it is a Git LFS pointer ...": what the first bytes of a file say that it is; "" when they say nothing.

    Args:
        head: some 100 bytes at least; all that there is when the file is shorter.
        binary: text of any kind is foreign too.
    """
    if not head:
        return ": it is empty"
    page = _PAGE.match(head.removeprefix(b"\xef\xbb\xbf"))
    if page is not None:
        kind = "XML" if page[1].lower() == b"?xml" else "HTML or XML"
        return f": it is an {kind} page, perhaps a server's answer to a download that failed"
    for magic, sentence in _MAGIC.items():
        if head.startswith(magic):
            return f": it {sentence}"
    start = head[:60].split(b"\n")[0][:40]
    if binary and len(start) > 3 and all(32 <= byte < 127 for byte in start):
        return f": it is text that begins with '{start.decode()}'"
    return ""


def foreign_file(path: str | os.PathLike, binary: bool = False) -> str:
    """The same of a file; "" also when it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return foreign_content(file.read(512), binary)
    except OSError:
        return ""
