"""Streaming parser for multipart forms with files, which are passed on piece by piece, and short text fields."""

from __future__ import annotations

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
            self._parser.write(chunk)
        except FormParserError as error:
            raise BadParameter(f"The multipart form is malformed: {error}.") from error

    def finish(self) -> None:
        """Check that the body has ended with the closing boundary."""
        if not self._has_ended:
            raise BadParameter("The multipart form is truncated: its closing boundary is missing. Send the form again.")

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
