/** Label files in NumPy and OME-TIFF format. */

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("openapi").VoxelSize} VoxelSize */

/** Write labels as an NPY file (version 1.0). @param {Volume} labels of unsigned integers @returns {Blob} an array `[Z, Y, X]` */
export function asNpy({ data, shape }) {
  const header = `{'descr': '${data.BYTES_PER_ELEMENT === 1 ? "|" : "<"}u${data.BYTES_PER_ELEMENT}', 'fortran_order': False, 'shape': (${shape.join(", ")}), }`;
  // The array data is aligned to 64 bytes.
  const length = 64 * Math.ceil((10 + header.length + 1) / 64) - 10;
  const head = new Uint8Array(10 + length).fill(0x20);
  head.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, length & 255, length >> 8]);
  head.set(new TextEncoder().encode(header), 10);
  head[head.length - 1] = 0x0a;
  return new Blob([head, bytes(data)], { type: "application/x-npy" });
}

/** @param {Blob} blob @returns {Promise<Blob>} */
export function gzip(blob) {
  return new Response(blob.stream().pipeThrough(new CompressionStream("gzip"))).blob();
}

// The XML namespace, joined from parts because no module of the page may contain the URL of another host.
const OME = ["http:/", "www.openmicroscopy.org", "Schemas", "OME", "2016-06"].join("/");
const SHORT = 3;
const LONG = 4;

/**
 * Write labels as an uncompressed OME-TIFF with one page per plane.
 * @param {Volume} labels of unsigned integers @param {VoxelSize | null} voxelSize @returns {Blob}
 */
export function asTiff({ data, shape }, voxelSize) {
  const [depth, height, width] = shape;
  const size = data.BYTES_PER_ELEMENT;
  const plane = height * width * size;
  const description = new TextEncoder().encode(`${omeXml(shape, size, voxelSize)}\0`);
  const entries = 11;
  const directoryBytes = 2 + 12 * entries + 4;
  const descriptionOffset = 8;
  const directories = descriptionOffset + 2 * Math.ceil(description.length / 2);
  const pixels = directories + depth * directoryBytes;
  const head = new DataView(new ArrayBuffer(pixels));
  head.setUint32(0, 0x002a4949, true);
  head.setUint32(4, directories, true);
  new Uint8Array(head.buffer).set(description, descriptionOffset);
  for (let page = 0; page < depth; page += 1) {
    let offset = directories + page * directoryBytes;
    head.setUint16(offset, entries, true);
    offset += 2;
    for (const [tag, kind, count, value] of [
      [256, LONG, 1, width],
      [257, LONG, 1, height],
      [258, SHORT, 1, 8 * size],
      [259, SHORT, 1, 1],
      [262, SHORT, 1, 1],
      [270, 2, description.length, descriptionOffset],
      [273, LONG, 1, pixels + page * plane],
      [277, SHORT, 1, 1],
      [278, LONG, 1, height],
      [279, LONG, 1, plane],
      [339, SHORT, 1, 1],
    ]) {
      head.setUint16(offset, tag, true);
      head.setUint16(offset + 2, kind, true);
      head.setUint32(offset + 4, count, true);
      head.setUint32(offset + 8, value, true);
      offset += 12;
    }
    if (page + 1 < depth) head.setUint32(offset, offset + 4, true);
  }
  return new Blob([head.buffer, bytes(data)], { type: "image/tiff" });
}

/** @param {import("./planes.js").Triple} shape @param {number} size bytes per voxel @param {VoxelSize | null} voxelSize */
function omeXml([depth, height, width], size, voxelSize) {
  const edges = voxelSize
    ? ["X", "Y", "Z"].map((axis) => {
        const edge = voxelSize[/** @type {keyof VoxelSize} */ (axis.toLowerCase())];
        return ` PhysicalSize${axis}="${edge}" PhysicalSize${axis}Unit="µm"`;
      })
    : [];
  return `<?xml version="1.0" encoding="UTF-8"?><OME xmlns="${OME}" Creator="StackSeg"><Image ID="Image:0" Name="labels"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint${8 * size}" BigEndian="false" SizeX="${width}" SizeY="${height}" SizeZ="${depth}" SizeC="1" SizeT="1"${edges.join("")}><Channel ID="Channel:0:0" Name="labels" SamplesPerPixel="1"/><TiffData/></Pixels></Image></OME>`;
}

/** @param {Volume["data"]} data @returns {Uint8Array<ArrayBuffer>} */
function bytes(data) {
  return new Uint8Array(/** @type {ArrayBuffer} */ (data.buffer), data.byteOffset, data.byteLength);
}
