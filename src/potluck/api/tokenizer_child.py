"""The process that `tokenizer_process` starts: texts in, tokens out, until its parent ends.

Run by its file, with nothing of Potluck on its path:

    parent ─▶ child    one byte (whether special tokens are added), the text's length in bytes, the text
    child ─▶ parent    the number of tokens, the tokens, 32 bits each
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import IO

HEAD = struct.Struct("<?Q")
COUNT = struct.Struct("<Q")


def exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other side has ended")
    return data


def main(path: str, requests: IO[bytes], replies: IO[bytes]) -> None:
    from tokenizers import Tokenizer  # The parent, which imports this file too, may have no need of it.

    tokenizer = Tokenizer.from_file(path)
    while head := requests.read(HEAD.size):
        special, size = HEAD.unpack(head)
        text = exactly(requests, size).decode()
        tokens = array("I", tokenizer.encode(text, add_special_tokens=special).ids)
        replies.write(COUNT.pack(len(tokens)))
        replies.write(tokens.tobytes())
        replies.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
