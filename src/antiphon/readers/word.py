"""Word (.docx): paragraphs and tables of the body, in order."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from zipfile import ZipFile

import docx
from docx.table import Table, _Cell
from docx.text.paragraph import Paragraph

from antiphon.engine.errors import InputError
from antiphon.readers.extracted import Extracted, normalise_text

MAX_UNPACKED_BYTES = 512 << 20


def read_word(name: str, data: bytes, max_unpacked_bytes: int = MAX_UNPACKED_BYTES) -> Extracted:
    """The text of the body: paragraphs set apart by blank lines, a table's rows on lines, its cells apart by tabs.

    Headers, footers, footnotes, comments and text boxes are not read. Raises InputError for a damaged file, one
    without text, and one that unpacks to over `max_unpacked_bytes` (checked before anything is unpacked).
    """
    try:
        _check_unpacked_size(name, data, max_unpacked_bytes)
        blocks = list(_blocks(docx.Document(BytesIO(data)).iter_inner_content()))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{name}: can't be read as a Word .docx file ({type(error).__name__}: {error})") from error
    text = normalise_text(name, "\n\n".join(blocks))
    if not text.strip():
        raise InputError(f"{name}: the Word file's body holds no text")
    return Extracted(text)


def _check_unpacked_size(name: str, data: bytes, max_unpacked_bytes: int) -> None:
    # zipfile never unpacks more of a member than the size stated here, so a file that understates it gains nothing.
    with ZipFile(BytesIO(data)) as archive:
        unpacked_bytes = sum(member.file_size for member in archive.infolist())
    if unpacked_bytes > max_unpacked_bytes:
        raise InputError(f"{name}: unpacks to {unpacked_bytes} bytes, more than the {max_unpacked_bytes} allowed")


def _blocks(content: Iterator[Paragraph | Table]) -> Iterator[str]:
    for block in content:
        text = block.text if isinstance(block, Paragraph) else "\n".join(_rows(block))
        if text.strip():
            yield text


def _rows(table: Table) -> Iterator[str]:
    # python-docx's `row.cells` repeats merged cells, and recurses once for each row that a cell spans.
    for row in table._tbl.tr_lst:
        cells = (_Cell(cell, table) for cell in row.tc_lst if cell.vMerge != "continue")
        yield "\t".join("\n".join(_blocks(cell.iter_inner_content())) for cell in cells)
