"""Each kind of file gives its text; each way in which one can be bad gives an InputError that names the file."""

from __future__ import annotations

import io
import time
import zipfile

import docx
import pypdf
import pytest
from docx.document import Document as WordDocument
from tiny_files import pdf

from antiphon.engine.errors import InputError
from antiphon.readers.detect import extract
from antiphon.readers.plain import check_encoding
from antiphon.readers.word import read_word


def text_of(name: str, data: bytes, encoding: str = "utf-8") -> str:
    return extract(name, data, encoding).text


def encrypted(user_password: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=pypdf.PdfReader(io.BytesIO(pdf(["The secret text."]))))
    writer.encrypt(user_password=user_password, owner_password="owner", algorithm="RC4-128")
    return written(writer)


def written(saved: pypdf.PdfWriter | WordDocument) -> bytes:
    out = io.BytesIO()
    saved.write(out) if isinstance(saved, pypdf.PdfWriter) else saved.save(out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        ("naïve 中 😀".encode(), "utf-8"),
        ("naïve 中 😀".encode("utf-8-sig"), "utf-8"),
        ("naïve 中 😀".encode("utf-16"), "utf-8"),
        (b"\xfe\xff" + "naïve 中 😀".encode("utf-16-be"), "utf-8"),
        ("naïve 中 😀".encode("utf-32"), "utf-8"),
        ("naïve 中 😀".encode("utf-16-le"), "utf-16-le"),
        ("naïve 中 😀".encode("gb18030"), "gb18030"),
        ("naïve 中 😀".encode("utf-8-sig"), "cp1252"),
    ],
)
def test_text_is_read_by_its_mark_or_by_the_encoding_named(data: bytes, encoding: str) -> None:
    assert text_of("a.txt", data, encoding) == "naïve 中 😀"


@pytest.mark.parametrize("name", ["a.md", "a.py", "a.unknown", "noext", "-", "a.json", "a.txt"])
def test_any_text_is_read_as_it_stands(name: str) -> None:
    text = "# Title\n\n<p>not markup</p>\n\tindented \x1b[1mbold\x0c\n"
    assert text_of(name, text.encode()) == text


@pytest.mark.parametrize(
    ("data", "encoding", "message"),
    [
        (b"", "utf-8", "is empty"),
        (b" \r\n\t", "utf-8", "only white space"),
        (b"\xef\xbb\xbf", "utf-8", "only white space"),
        (b"caf\xe9 ok", "utf-8", "offset 3 is not utf-8.*--encoding"),
        ("naïve".encode(), "ascii", "offset 2 is not ascii"),
        (b"abc\x81", "cp1252", "offset 3 is not cp1252"),
        (b"\xff\xfea", "utf-8", "offset 0 is not utf-16|offset 2"),
        (b"text\0text", "utf-8", "character 4 is NUL"),
        (b"\x89PNG\0", "utf-8", "is NUL: a binary file"),
        (bytes(range(1, 32)) * 9, "utf-8", "control characters"),
        (bytes(range(128, 256)) * 9, "latin-1", "control characters"),
        ("naïve".encode("utf-16-le"), "utf-8", "NUL"),
        (bytes.fromhex("d0cf11e0a1b11ae1") + b"old", "utf-8", "password-protected Office"),
    ],
)
def test_bytes_that_are_no_text_are_refused_with_the_reason(data: bytes, encoding: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^a.txt: .*({message})"):
        text_of("a.txt", data, encoding)


@pytest.mark.parametrize("encoding", ["nonsense", "", "base64", "rot13", "a\0b", "utf\ud800"])
def test_an_unknown_encoding_is_refused_by_name(encoding: str) -> None:
    with pytest.raises(InputError, match="unknown text encoding"):
        check_encoding(encoding)


def test_html_gives_the_visible_text_with_blocks_on_lines() -> None:
    page = """<!DOCTYPE html><html><head><title>A  title</title><style>p {}</style><script>x < 1</script></head>
    <body><!-- no --><h1>Head</h1><p>One <b>bold</b>,
      two&nbsp;&amp; three.<br>After</p><ul><li>a</li><li>b</li></ul>
    <table><tr><td>1</td><td>2</td></tr><tr><td>3</td></tr></table><pre>  keep
    this</pre><template>no</template>end</body></html>"""
    assert text_of("a.html", page.encode()) == (
        "A title\n\nHead\n\nOne bold, two & three.\nAfter\n\na\nb\n\n1\t2\n3\n\n  keep\n    this\n\nend"
    )


def test_html_without_a_suffix_is_recognised_and_with_a_text_suffix_left_alone() -> None:
    page = b"\n<!doctype html><p>Seen</p>"
    assert text_of("-", page) == "Seen"
    assert text_of("a.txt", page) == page.decode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<script>only()</script>", "no text outside"),
        (b"<meta charset=windows-1252><p>caf\xe9", "not utf-8.*says that it is windows-1252"),
        (b"<p>a\0b", "NUL"),
    ],
)
def test_bad_html_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        text_of("a.html", data)


@pytest.mark.parametrize("unit", ["<a ", "<!--", "<![CDATA[", "<a b='", "<div>"])
@pytest.mark.parametrize("tail", ["", ">"])
def test_html_that_is_never_closed_takes_no_quadratic_time(unit: str, tail: str) -> None:
    """Without its guard html.parser takes 8 seconds for 5,000 of the first kind, and 32 for 10,000."""
    before = time.process_time()
    assert text_of("a.html", ("hello " + unit * 10_000 + tail).encode()).startswith("hello")
    assert time.process_time() - before < 5


def test_pdf_pages_are_kept_and_pages_without_text_are_noted() -> None:
    extracted = extract("a.pdf", pdf(["First page.", "", "Third page."]), "utf-8")
    assert extracted.text == "First page.\n\nThird page."
    assert extracted.page_starts == (0, 12, 13)
    assert extracted.notes == ("a.pdf: 1 of 3 pages have no extractable text (page 2)",)


def test_pdf_is_recognised_without_its_suffix_and_text_about_pdf_is_not_one() -> None:
    assert text_of("-", pdf(["Piped."])) == "Piped."
    assert text_of("a.py", b'MAGIC = b"%PDF-1.4"\n') == 'MAGIC = b"%PDF-1.4"\n'


def test_pdf_encrypted_with_an_empty_password_is_read_and_with_another_refused() -> None:
    assert text_of("a.pdf", encrypted("")) == "The secret text."
    with pytest.raises(InputError, match=r"a\.pdf: is encrypted"):
        text_of("a.pdf", encrypted("secret"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pdf(["", ""]), "none of its 2 pages .* likely scanned"),
        (pdf(["Whole."])[:60], "can't be read as PDF"),
        (b"%PDF-1.7\n" + bytes(range(256)), "can't be read as PDF"),
        (b"plain words", "can't be read as PDF"),
    ],
)
def test_bad_pdf_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=f"^a.pdf: .*{message}"):
        text_of("a.pdf", data)


def word_file() -> bytes:
    document = docx.Document()
    document.add_heading("Report")
    document.add_paragraph("Before the table.")
    table = document.add_table(rows=3, cols=2)
    for row, cells in enumerate([("a", "b"), ("c", "d"), ("e", "f")]):
        for column, text in enumerate(cells):
            table.cell(row, column).text = text
    table.cell(1, 0).merge(table.cell(2, 0))
    document.add_paragraph("")
    document.add_paragraph("After the table.")
    return written(document)


def test_word_gives_paragraphs_and_tables_in_order_and_merged_cells_once() -> None:
    expected = "Report\n\nBefore the table.\n\na\tb\nc\ne\td\nf\n\nAfter the table."
    assert text_of("a.docx", word_file()) == expected
    assert text_of("-", word_file()) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (written(docx.Document()), "holds no text"),
        (word_file()[:2000], "can't be read as a Word"),
        (b"PK\x03\x04 broken", "can't be read as a Word"),
        (b"plain words", "can't be read as a Word"),
    ],
)
def test_bad_word_files_are_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(InputError, match=f"^a.docx: .*{message}"):
        text_of("a.docx", data)


def test_a_zip_bomb_is_refused_before_it_is_unpacked() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for index in range(5):
            archive.writestr(f"word/document.xml{index}", b"\0" * (1 << 20))
    assert len(out.getvalue()) < 20_000
    with pytest.raises(InputError, match="unpacks to 5242880 bytes, more than the 5242879"):
        read_word("a.docx", out.getvalue(), max_unpacked_bytes=(5 << 20) - 1)
    with pytest.raises(InputError, match="can't be read as a Word"):
        read_word("a.docx", out.getvalue(), max_unpacked_bytes=5 << 20)


def test_another_zip_is_a_binary_file() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", "words")
    with pytest.raises(InputError, match="binary"):
        text_of("a.zip", out.getvalue())
