"""Streaming parser for multipart forms with files, which are passed on piece by piece, and short text fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.core.errors import BadParameter

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# Maximum size of the value of a text field.
MAX_FIELD_BYTES = 4096
MAX_FIELDS = 32
# Maximum size of boundaries, part headers and text fields, in addition to the files.
MAX_FORM_BYTES = 2 * MAX_FIELDS * MAX_FIELD_BYTES
# Maximum size of the text before the first boundary, and maximum number of blanks after a boundary.
MAX_PREAMBLE_BYTES = 2**16
MAX_PADDING = 64
# Values of Content-Transfer-Encoding that leave the content of a part unchanged.
IDENTITY_ENCODINGS = frozenset({b"7bit", b"8bit", b"binary"})


class FormFile(Protocol):
    """Receiver of one file of a form."""

    def set_name(self, name: str) -> None:
        """Set the file name that the client sent."""

    def add_data(self, data: memoryview) -> None:
        """Add the next bytes of the file, passed as a view of the parsed chunk."""


class FormParser:
    """Parser for a multipart form that arrives in chunks of any size. All methods raise BadParameter for invalid forms.

    files   receivers of files by form field
    fields  dictionary to which the values of all other fields are added
    """

    def __init__(
        self,
        boundary: bytes,
        files: Mapping[str, FormFile],
        fields: dict[str, str],
    ) -> None:
        self._files, self._fields = files, fields
        self._header_name, self._header_value, self._field_value = bytearray(), bytearray(), bytearray()
        self._field_name = ""
        self._received_fields = set[str]()
        self._has_ended = False
        # Received part of the preamble; None after the first boundary. The first newline replaces that before the form.
        self._preamble: bytearray | None = bytearray(b"\n")
        self._delimiter = b"--" + boundary
        self._first_line = re.compile(b"\n%b(--|[ \t]{,%d}(\r?\n))" % (re.escape(self._delimiter), MAX_PADDING))
        if not boundary:
            raise BadParameter(
                "The Content-Type of the multipart form has no boundary. Let your HTTP library set this header."
            )
        try:
            self._parser = MultipartParser(boundary, self._make_callbacks())
        except FormParserError as error:
            raise BadParameter(f"The boundary of the multipart form is invalid: {error}.") from error

    def feed(self, chunk: bytes) -> None:
        """Parse the next bytes of the body."""
        try:
            self._parser.write(chunk if self._preamble is None else self._skip_preamble(self._preamble, chunk))
        except FormParserError as error:
            raise BadParameter(f"The multipart form is malformed: {error}.") from error

    def finish(self) -> None:
        """Check that the body has ended with the closing boundary."""
        if self._preamble is not None and len(self._preamble) > 1:
            raise self._make_boundary_error()
        if not self._has_ended:
            raise BadParameter("The multipart form is truncated: its closing boundary is missing. Send the form again.")

    def _skip_preamble(self, preamble: bytearray, chunk: bytes) -> bytes:
        """Return the bytes from the first boundary on. The text before it has no meaning (RFC 2046, section 5.1.1)."""
        if len(preamble) == 1 and chunk.startswith((self._delimiter + b"\r\n", self._delimiter + b"--")):
            # The usual case, in which no bytes are copied.
            self._preamble = None
            return chunk
        # The line with the boundary may have begun in an earlier chunk.
        start = max(0, len(preamble) - len(self._delimiter) - MAX_PADDING - len(b"\n\r\n"))
        preamble += chunk
        if (match := self._first_line.search(preamble, start)) is None:
            if len(preamble) > MAX_PREAMBLE_BYTES:
                raise self._make_boundary_error()
            return b""
        if match[2] == b"\n":
            raise BadParameter(
                "The lines of the multipart form end with LF instead of CRLF. Let your HTTP library create the form."
            )
        self._preamble = None
        # The parser does not support blanks after the first boundary.
        return self._delimiter + (match[2] or match[1]) + preamble[match.end() :]

    def _make_boundary_error(self) -> BadParameter:
        return BadParameter(
            "The multipart form does not begin with its boundary. The boundary in the Content-Type must be the one that"
            " separates the fields in the body. Let your HTTP library create both."
        )

    def _make_callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._add_part_data,
            "on_part_end": self._end_part,
            "on_end": self._end_form,
        }

    def _begin_part(self) -> None:
        self._field_name = ""
        self._field_value.clear()

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._header_value))
            self._field_name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._field_name in self._files:
                self._begin_file(options.get(b"filename", b"").decode("utf-8", "replace"))
        elif (
            self._header_name.lower() == b"content-transfer-encoding"
            and bytes(self._header_value).strip().lower() not in IDENTITY_ENCODINGS
        ):
            raise BadParameter(
                "The multipart form has a field with an encoding, such as base64, in Content-Transfer-Encoding. HTTP"
                " forms contain the bytes of a file as they are (RFC 7578). Let your HTTP library create the form."
            )
        self._header_name.clear()
        self._header_value.clear()

    def _begin_file(self, name: str) -> None:
        if self._field_name in self._received_fields:
            raise BadParameter(
                f"The form has more than one file in the field {self._field_name!r}. Send one file per request."
            )
        self._received_fields.add(self._field_name)
        self._files[self._field_name].set_name(name)

    def _add_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field_name in self._files:
            self._files[self._field_name].add_data(memoryview(data)[start:end])
            return
        self._field_value += data[start:end]
        if len(self._field_value) > MAX_FIELD_BYTES:
            raise BadParameter(
                f"The value of the form field {self._field_name[:40]!r} is too long. Send files in {self._file_fields}."
            )

    @property
    def _file_fields(self) -> str:
        field_names = " and ".join(repr(name) for name in self._files)
        return f"the field{'s' if len(self._files) > 1 else ''} {field_names}"

    def _end_part(self) -> None:
        if self._field_name in self._files:
            return
        if self._field_name in self._fields:
            raise BadParameter(f"The form has the field {self._field_name[:40]!r} twice. Send each field once.")
        self._fields[self._field_name] = self._field_value.decode("utf-8", "replace")
        if len(self._fields) > MAX_FIELDS:
            raise BadParameter(f"The form has more than {MAX_FIELDS} fields. Send only the parameters of the request.")

    def _end_form(self) -> None:
        self._has_ended = True
