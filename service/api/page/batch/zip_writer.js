/** Writer for ZIP archives without compression. The archive refers to the blobs of its files, so that browsers can keep their content on disk. */

const LOCAL_HEADER_SIGNATURE = 0x04034b50;
const DIRECTORY_ENTRY_SIGNATURE = 0x02014b50;
const DIRECTORY_END_SIGNATURE = 0x06054b50;
const ZIP64_DIRECTORY_END_SIGNATURE = 0x06064b50;
const ZIP64_LOCATOR_SIGNATURE = 0x07064b50;
const ZIP64_EXTRA_ID = 1;
const VERSION = 20;
const ZIP64_VERSION = 45;
/** General purpose flag: file names are encoded in UTF-8. */
const UTF8_FLAG = 0x0800;
/** Sizes, offsets and counts with these values are in a ZIP64 record instead. */
const MAX_UINT32 = 0xffffffff;
const MAX_UINT16 = 0xffff;

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, value) => {
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value >>> 0;
});

/** Compute the CRC-32 of a blob. The blob is read in chunks. @param {Blob} blob @param {AbortSignal} [signal] @returns {Promise<number>} */
export async function computeCrc32(blob, signal) {
  let crc = MAX_UINT32;
  const reader = blob.stream().getReader();
  for (;;) {
    signal?.throwIfAborted();
    const { done, value } = await reader.read();
    if (done) return (crc ^ MAX_UINT32) >>> 0;
    for (let index = 0; index < value.length; index += 1) crc = CRC_TABLE[(crc ^ value[index]) & 255] ^ (crc >>> 8);
  }
}

/** Little-endian fields of a record. */
class RecordBuilder {
  /** @param {number} signature */
  constructor(signature) {
    /** @type {number[]} */
    this.bytes = [];
    this.addUint32(signature);
  }

  /** @param {...number} values */
  addUint16(...values) {
    for (const value of values) this.bytes.push(value & 255, (value >>> 8) & 255);
    return this;
  }

  /** @param {...number} values */
  addUint32(...values) {
    for (const value of values) this.addUint16(value & MAX_UINT16, value >>> 16);
    return this;
  }

  /** @param {...number} values */
  addUint64(...values) {
    for (const value of values) this.addUint32(value % 2 ** 32, Math.floor(value / 2 ** 32));
    return this;
  }

  build() {
    return Uint8Array.from(this.bytes);
  }
}

/** @typedef {{name: Uint8Array<ArrayBuffer>, crc: number, size: number, offset: number}} ArchivedFile */

/** An archive in progress. */
export class ZipWriter {
  constructor() {
    /** @type {BlobPart[]} */
    this.parts = [];
    this.offset = 0;
    /** @type {ArchivedFile[]} */
    this.files = [];
    const now = new Date();
    this.time = (now.getHours() << 11) | (now.getMinutes() << 5) | (now.getSeconds() >> 1);
    this.date = ((now.getFullYear() - 1980) << 9) | ((now.getMonth() + 1) << 5) | now.getDate();
  }

  /** Add a file. @param {string} path with slashes @param {Blob} content @param {AbortSignal} [signal] */
  async add(path, content, signal) {
    const crc = await computeCrc32(content, signal);
    const file = { name: new TextEncoder().encode(path), crc, size: content.size, offset: this.offset };
    this.files.push(file);
    const needsZip64 = file.size >= MAX_UINT32;
    const size = needsZip64 ? MAX_UINT32 : file.size;
    const header = new RecordBuilder(LOCAL_HEADER_SIGNATURE)
      .addUint16(needsZip64 ? ZIP64_VERSION : VERSION, UTF8_FLAG, 0, this.time, this.date)
      .addUint32(crc, size, size)
      .addUint16(file.name.length, needsZip64 ? 20 : 0);
    this.#append(header.build(), file.name);
    if (needsZip64)
      this.#append(new RecordBuilder(ZIP64_EXTRA_ID | (16 << 16)).addUint64(file.size, file.size).build());
    this.#append(content);
  }

  /** Finish the archive. @returns {Blob} */
  finish() {
    const directoryOffset = this.offset;
    for (const file of this.files) this.#appendDirectoryEntry(file);
    const directoryBytes = this.offset - directoryOffset;
    const count = this.files.length;
    if (count >= MAX_UINT16 || directoryOffset + directoryBytes >= MAX_UINT32) {
      const end = this.offset;
      this.#append(
        new RecordBuilder(ZIP64_DIRECTORY_END_SIGNATURE)
          .addUint64(44)
          .addUint16(ZIP64_VERSION, ZIP64_VERSION)
          .addUint32(0, 0)
          .addUint64(count, count, directoryBytes, directoryOffset)
          .build(),
        new RecordBuilder(ZIP64_LOCATOR_SIGNATURE).addUint32(0).addUint64(end).addUint32(1).build(),
      );
    }
    const limitedCount = Math.min(count, MAX_UINT16);
    this.#append(
      new RecordBuilder(DIRECTORY_END_SIGNATURE)
        .addUint16(0, 0, limitedCount, limitedCount)
        .addUint32(Math.min(directoryBytes, MAX_UINT32), Math.min(directoryOffset, MAX_UINT32))
        .addUint16(0)
        .build(),
    );
    return new Blob(this.parts, { type: "application/zip" });
  }

  /** @param {ArchivedFile} file */
  #appendDirectoryEntry({ name, crc, size, offset }) {
    const needsZip64 = size >= MAX_UINT32 || offset >= MAX_UINT32;
    const limitedSize = needsZip64 ? MAX_UINT32 : size;
    this.#append(
      new RecordBuilder(DIRECTORY_ENTRY_SIGNATURE)
        .addUint16(needsZip64 ? ZIP64_VERSION : VERSION, needsZip64 ? ZIP64_VERSION : VERSION)
        .addUint16(UTF8_FLAG, 0, this.time, this.date)
        .addUint32(crc, limitedSize, limitedSize)
        .addUint16(name.length, needsZip64 ? 28 : 0, 0, 0, 0)
        .addUint32(0, needsZip64 ? MAX_UINT32 : offset)
        .build(),
      name,
    );
    if (needsZip64) this.#append(new RecordBuilder(ZIP64_EXTRA_ID | (24 << 16)).addUint64(size, size, offset).build());
  }

  /** @param {...(Uint8Array<ArrayBuffer> | Blob)} parts */
  #append(...parts) {
    for (const part of parts) {
      this.parts.push(part);
      this.offset += part instanceof Blob ? part.size : part.length;
    }
  }
}
