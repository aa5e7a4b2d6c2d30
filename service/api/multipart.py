"""A multipart form that is parsed while it arrives: one file, which goes straight on, and short texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.core.errors import BadParameter

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FIELD_BYTES = 4096
FIELDS = 32
# What boundaries, part headers and fields may add to the file.
FORM_BYTES = 2 * FIELDS * FIELD_BYTES


class Form:
    """Sorts the parts of a form: those of `file` go to `take`, without a copy, every other is a short text in `fields`.

    `named` is called with the name of the file. All methods raise BadParameter for what is not such a form.
    """

    def __init__(self, boundary: bytes, take: Callable[[memoryview], None], fields: dict[str, str]) -> None:
        self.named: Callable[[str], None] = lambda _name: None
        self._take, self._fields = take, fields
        self._header, self._value, self._text = bytearray(), bytearray(), bytearray()
        self._name = ""
        self._files = 0
        self._ended = False
        if not boundary:
            raise BadParameter("The multipart form states no boundary.")
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise BadParameter(f"The multipart form cannot be read: {error}.") from error

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the body."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise BadParameter(f"The multipart form is broken: {error}.") from error

    def finish(self) -> None:
        """The body has ended."""
        if not self._ended:
            raise BadParameter("The multipart form is cut short: its closing boundary is missing.")

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._name = ""
        self._text.clear()

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name == "file":
                self._files += 1
                self.named(options.get(b"filename", b"").decode("utf-8", "replace"))
        self._header.clear()
        self._value.clear()
        if self._files > 1:
            raise BadParameter("The form carries more than one file; post one stack per request.")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._take(memoryview(data)[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > FIELD_BYTES:
            raise BadParameter(f"The form field {self._name[:40]!r} is too long; the stack goes into the field 'file'.")

    def _end(self) -> None:
        if self._name == "file":
            return
        if self._name in self._fields:
            raise BadParameter(f"The form carries the field {self._name[:40]!r} twice.")
        self._fields[self._name] = self._text.decode("utf-8", "replace")
        if len(self._fields) > FIELDS:
            raise BadParameter(f"The form has more than {FIELDS} fields.")

    def _finish(self) -> None:
        self._ended = True
