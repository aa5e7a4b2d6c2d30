"""Parse a multipart form while it arrives: files, passed on piece by piece, and short text fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.core.errors import BadParameter

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 32
# What boundaries, part headers and fields may add to the file.
MAX_FORM_BYTES = 2 * MAX_FIELDS * MAX_FIELD_BYTES


class FormFile(Protocol):
    """Takes a file of a form as it arrives; its bytes are not copied."""

    def set_name(self, name: str) -> None:
        """Take the name that the client gives the file."""

    def add_data(self, data: memoryview) -> None:
        """Take the next bytes."""


class FormParser:
    """Parser of a form in chunks of any size. All methods raise BadParameter for a body that is not such a form.

    files   what takes the file of a part, by the name of the part
    fields  where the text of every other part is put, by name
    """

    def __init__(
        self,
        boundary: bytes,
        files: Mapping[str, FormFile],
        fields: dict[str, str],
    ) -> None:
        self._files, self._fields = files, fields
        self._header, self._value, self._text = bytearray(), bytearray(), bytearray()
        self._name = ""
        self._seen = set[str]()
        self._ended = False
        if not boundary:
            raise BadParameter("The multipart form states no boundary.")
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise BadParameter(f"The multipart form cannot be read: {error}.") from error

    def feed(self, chunk: bytes) -> None:
        """Parse the next bytes of the body."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise BadParameter(f"The multipart form is broken: {error}.") from error

    def finish(self) -> None:
        """Check that the body has ended with the closing boundary."""
        if not self._ended:
            raise BadParameter("The multipart form is cut short: its closing boundary is missing.")

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._add_part_data,
            "on_part_end": self._end_part,
            "on_end": self._end_form,
        }

    def _begin_part(self) -> None:
        self._name = ""
        self._text.clear()

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name in self._files:
                self._begin_file(options.get(b"filename", b"").decode("utf-8", "replace"))
        self._header.clear()
        self._value.clear()

    def _begin_file(self, name: str) -> None:
        if self._name in self._seen:
            raise BadParameter(f"The form carries more than one file {self._name!r}; post one stack per request.")
        self._seen.add(self._name)
        self._files[self._name].set_name(name)

    def _add_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name in self._files:
            self._files[self._name].add_data(memoryview(data)[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            raise BadParameter(f"The form field {self._name[:40]!r} is too long; files go into {self._expected}.")

    @property
    def _expected(self) -> str:
        names = " and ".join(repr(name) for name in self._files)
        return f"the field{'s' if len(self._files) > 1 else ''} {names}"

    def _end_part(self) -> None:
        if self._name in self._files:
            return
        if self._name in self._fields:
            raise BadParameter(f"The form carries the field {self._name[:40]!r} twice.")
        self._fields[self._name] = self._text.decode("utf-8", "replace")
        if len(self._fields) > MAX_FIELDS:
            raise BadParameter(f"The form has more than {MAX_FIELDS} fields.")

    def _end_form(self) -> None:
        self._ended = True
