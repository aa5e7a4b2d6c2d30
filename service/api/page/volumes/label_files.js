/** Functions that encode labels as NumPy and NIfTI files, encode labels and images as OME-TIFF files, and decode NumPy files. */

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("openapi").VoxelSize} VoxelSize */

/** Encode labels as an NPY file (version 1.0). @param {Volume} labels of unsigned integers @returns {Blob} file with an array `[Z, Y, X]` */
export function encodeNpy({ data, shape }) {
  const header = `{'descr': '${data.BYTES_PER_ELEMENT === 1 ? "|" : "<"}u${data.BYTES_PER_ELEMENT}', 'fortran_order': False, 'shape': (${shape.join(", ")}), }`;
  // Pad the header, so that the array data is aligned to 64 bytes.
  const paddedLength = 64 * Math.ceil((10 + header.length + 1) / 64) - 10;
  const headerBytes = new Uint8Array(10 + paddedLength).fill(0x20);
  headerBytes.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, paddedLength & 255, paddedLength >> 8]);
  headerBytes.set(new TextEncoder().encode(header), 10);
  headerBytes[headerBytes.length - 1] = 0x0a;
  return new Blob([headerBytes, viewBytes(data)], { type: "application/x-npy" });
}

const NPY_TYPES = { "|u1": Uint8Array, "<u2": Uint16Array, "<u4": Uint32Array };

/** Decode the labels of an NPY file that the service sent. @param {ArrayBuffer} file @returns {Uint8Array | Uint16Array | Uint32Array} */
export function decodeNpy(file) {
  const headerBytes = new DataView(file).getUint16(8, true);
  const header = new TextDecoder().decode(new Uint8Array(file, 10, headerBytes));
  const type = /'descr': '([^']+)'/.exec(header)?.[1];
  const ArrayType = NPY_TYPES[/** @type {keyof typeof NPY_TYPES} */ (type)];
  if (ArrayType === undefined) throw new Error(`The service sent labels of the type ${type}.`);
  // Copy the pixels, because a typed array must start at a multiple of its item size.
  return new ArrayType(file.slice(10 + headerBytes));
}

const NIFTI_HEADER_BYTES = 352;
/** Types of pixels in NIfTI by the number of bytes. */
const NIFTI_TYPES = { 1: 2, 2: 512, 4: 768 };
const NIFTI_INTENT_LABEL = 1002;
const NIFTI_UNIT_MICROMETER = 3;
const NIFTI_SCANNER_COORDINATES = 1;

/** Encode labels as a compressed NIfTI-1 file, in the same way as the service. @param {Volume} labels of unsigned integers @param {VoxelSize | null} voxelSize @returns {Promise<Blob>} */
export function encodeNifti({ data, shape }, voxelSize) {
  const [z, y, x] = shape;
  const steps = voxelSize ? [voxelSize.x, voxelSize.y, voxelSize.z] : [1, 1, 1];
  const bytesPerVoxel = /** @type {keyof typeof NIFTI_TYPES} */ (data.BYTES_PER_ELEMENT);
  const header = new DataView(new ArrayBuffer(NIFTI_HEADER_BYTES));
  const setShorts = (/** @type {number} */ offset, /** @type {number[]} */ values) =>
    values.forEach((value, index) => {
      header.setInt16(offset + 2 * index, value, true);
    });
  const setFloats = (/** @type {number} */ offset, /** @type {number[]} */ values) =>
    values.forEach((value, index) => {
      header.setFloat32(offset + 4 * index, value, true);
    });
  header.setInt32(0, 348, true);
  setShorts(40, [3, x, y, z, 1, 1, 1, 1]);
  setShorts(68, [NIFTI_INTENT_LABEL, NIFTI_TYPES[bytesPerVoxel], 8 * bytesPerVoxel]);
  setFloats(76, [1, ...steps, 1, 1, 1, 1]);
  setFloats(108, [NIFTI_HEADER_BYTES, 1]);
  header.setUint8(123, voxelSize ? NIFTI_UNIT_MICROMETER : 0);
  setShorts(252, [NIFTI_SCANNER_COORDINATES, NIFTI_SCANNER_COORDINATES]);
  for (const [row, step] of steps.entries()) header.setFloat32(280 + 20 * row, step, true);
  new Uint8Array(header.buffer).set(new TextEncoder().encode("n+1\0"), 344);
  return gzip(new Blob([header.buffer, viewBytes(data)]));
}

/** Compress a blob. @param {Blob} blob @returns {Promise<Blob>} */
export function gzip(blob) {
  return new Response(blob.stream().pipeThrough(new CompressionStream("gzip"))).blob();
}

// XML namespace, from which nothing is loaded.
const OME_NAMESPACE = "http://www.openmicroscopy.org/Schemas/OME/2016-06";
/** TIFF field types: strings, 16-bit unsigned integers, and 32-bit unsigned integers. */
const TYPE_ASCII = 2;
const TYPE_SHORT = 3;
const TYPE_LONG = 4;
/** TIFF sample formats by kind of pixels. */
const SAMPLE_FORMATS = { uint: 1, int: 2, float: 3 };

/**
 * Encode labels or an image as an uncompressed OME-TIFF with one page per plane.
 * @param {Pick<Volume, "data" | "shape">} volume one after another, the time points or channels of the shape `[Z, Y, X]` @param {VoxelSize | null} voxelSize
 * @param {string} [name] of the image @param {string[]} [channelNames] @param {number} [timePointCount]
 * @returns {Blob}
 */
export function encodeTiff({ data, shape }, voxelSize, name = "labels", channelNames = [name], timePointCount = 1) {
  const [planesPerVolume, height, width] = shape;
  const depth = planesPerVolume * channelNames.length * timePointCount;
  const bytesPerVoxel = data.BYTES_PER_ELEMENT;
  const planeBytes = height * width * bytesPerVoxel;
  const description = new TextEncoder().encode(
    `${createOmeXml({ data, shape }, voxelSize, name, channelNames, timePointCount)}\0`,
  );
  const entryCount = 11;
  const directoryBytes = 2 + 12 * entryCount + 4;
  const descriptionOffset = 8;
  const directoriesOffset = descriptionOffset + 2 * Math.ceil(description.length / 2);
  const pixelsOffset = directoriesOffset + depth * directoryBytes;
  const header = new DataView(new ArrayBuffer(pixelsOffset));
  header.setUint32(0, 0x002a4949, true);
  header.setUint32(4, directoriesOffset, true);
  new Uint8Array(header.buffer).set(description, descriptionOffset);
  for (let page = 0; page < depth; page += 1) {
    let offset = directoriesOffset + page * directoryBytes;
    header.setUint16(offset, entryCount, true);
    offset += 2;
    for (const [tag, type, count, value] of [
      [256, TYPE_LONG, 1, width],
      [257, TYPE_LONG, 1, height],
      [258, TYPE_SHORT, 1, 8 * bytesPerVoxel],
      [259, TYPE_SHORT, 1, 1],
      [262, TYPE_SHORT, 1, 1],
      [270, TYPE_ASCII, description.length, descriptionOffset],
      [273, TYPE_LONG, 1, pixelsOffset + page * planeBytes],
      [277, TYPE_SHORT, 1, 1],
      [278, TYPE_LONG, 1, height],
      [279, TYPE_LONG, 1, planeBytes],
      [339, TYPE_SHORT, 1, SAMPLE_FORMATS[getPixelKind(data)]],
    ]) {
      header.setUint16(offset, tag, true);
      header.setUint16(offset + 2, type, true);
      header.setUint32(offset + 4, count, true);
      header.setUint32(offset + 8, value, true);
      offset += 12;
    }
    if (page + 1 < depth) header.setUint32(offset, offset + 4, true);
  }
  return new Blob([header.buffer, viewBytes(data)], { type: "image/tiff" });
}

/** @param {Volume["data"]} data */
function getPixelKind(data) {
  if (data instanceof Float32Array) return "float";
  return data instanceof Int8Array || data instanceof Int16Array || data instanceof Int32Array ? "int" : "uint";
}

/** @param {Volume["data"]} data @returns {string} type of the pixels in OME-XML */
function getPixelType(data) {
  const kind = getPixelKind(data);
  return kind === "float" ? kind : `${kind}${8 * data.BYTES_PER_ELEMENT}`;
}

/** @param {string} text @returns {string} text of an attribute, without the characters that XML does not allow */
function escapeXml(text) {
  return text.replace(/[^ -~\u00a0-\ud7ff]/g, "").replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);
}

/** @param {Pick<Volume, "data" | "shape">} volume @param {VoxelSize | null} voxelSize @param {string} name @param {string[]} channelNames @param {number} timePointCount */
function createOmeXml({ data, shape }, voxelSize, name, channelNames, timePointCount) {
  const [depth, height, width] = shape;
  const channels = channelNames.map(
    (channel, index) => `<Channel ID="Channel:0:${index}" Name="${escapeXml(channel)}" SamplesPerPixel="1"/>`,
  );
  const sizeAttributes = voxelSize
    ? ["X", "Y", "Z"].map((axis) => {
        const length = voxelSize[/** @type {keyof VoxelSize} */ (axis.toLowerCase())];
        return ` PhysicalSize${axis}="${length}" PhysicalSize${axis}Unit="µm"`;
      })
    : [];
  return `<?xml version="1.0" encoding="UTF-8"?><OME xmlns="${OME_NAMESPACE}" Creator="StackSeg"><Image ID="Image:0" Name="${escapeXml(name)}"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="${getPixelType(data)}" BigEndian="false" SizeX="${width}" SizeY="${height}" SizeZ="${depth}" SizeC="${channelNames.length}" SizeT="${timePointCount}"${sizeAttributes.join("")}>${channels.join("")}<TiffData/></Pixels></Image></OME>`;
}

/** @param {Volume["data"]} data @returns {Uint8Array<ArrayBuffer>} */
function viewBytes(data) {
  return new Uint8Array(/** @type {ArrayBuffer} */ (data.buffer), data.byteOffset, data.byteLength);
}
