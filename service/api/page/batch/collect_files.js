/** Functions that collect the stacks among dropped or chosen files and folders. */

import { formatCount } from "../core/format.js";
import { ZipWriter } from "./zip_writer.js";

/** @typedef {{path: string, file: File}} FilePart path: relative to the OME-Zarr folder, or to the folder of the OIF; for a file, its name */
/**
 * @typedef {object} FoundFile
 * @property {string} path relative to the dropped or chosen folder
 * @property {FilePart[]} parts one part, or the files of an OME-Zarr folder or of an OIF
 * @property {string} skipReason why the file is not a stack, "" if it can be one
 */

/** Suffixes of the supported formats. Files with other suffixes are stacks if their content is that of a TIFF. */
const STACK_SUFFIX_PATTERN = /\.(tiff?|tf2|tf8|btf|lsm|stk|czi|nd2|lif|oib|ims|ozx|zip)$/i;
const ZARR_FOLDER_PATTERN = /^(.*?\.zarr)\/(.+)$/i;
/** An OIF describes the image, and a folder with the same name contains its planes. */
const OIF_PATTERN = /^((?:.*\/)?)(([^/]*\.oif)(?:\.files\/.+)?)$/i;
/** Files and folders that file managers and file servers create. */
const SYSTEM_NAME_PATTERN = /^(\..*|thumbs\.db|ehthumbs\.db|desktop\.ini|__macosx|@eadir|\$recycle\.bin)$/i;
const TIFF_SIGNATURES = ["II*\0", "MM\0*", "II+\0", "MM\0+"];
/** Maximum number of stacks that the service stores for one user. */
export const MAX_STACKS = 1000;

/** @typedef {{files: File[], isFolder: boolean, list: () => Promise<FoundFile[]>}} Selection files: without the content of folders; isFolder: whether a folder was dropped or chosen; list: finds all files */

/** Return the files that were chosen, and allow choosing them again. @param {HTMLInputElement} input @returns {Selection} */
export function selectChosenFiles(input) {
  const files = [...(input.files ?? [])];
  const parts = files.map((file) => ({ path: file.webkitRelativePath || file.name, file }));
  input.value = "";
  return { files, isFolder: files.some((file) => file.webkitRelativePath !== ""), list: () => classifyFiles(parts) };
}

/** Accept files dropped anywhere on the page. @param {HTMLElement | null} dropArea highlighted while a file is dragged @param {(selection: Selection) => void} ondrop */
export function acceptDrops(dropArea, ondrop) {
  document.ondragover = (event) => {
    event.preventDefault();
    dropArea?.classList.add("dragover");
  };
  document.ondragleave = () => dropArea?.classList.remove("dragover");
  document.ondrop = (event) => {
    event.preventDefault();
    dropArea?.classList.remove("dragover");
    if (event.dataTransfer?.files.length) ondrop(readDrop(event.dataTransfer));
  };
}

/** Read the dropped files and folders. This has to happen in the event handler, because browsers clear the data afterwards. @param {DataTransfer} dataTransfer @returns {Selection} */
function readDrop(dataTransfer) {
  const entries = [...dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter((entry) => entry !== null);
  const files = [...dataTransfer.files];
  return {
    files,
    isFolder: entries.some((entry) => entry.isDirectory),
    list: async () => {
      /** @type {FilePart[]} */
      const parts = [];
      for (const entry of entries) await searchEntry(entry, "", parts);
      return classifyFiles(entries.length > 0 ? parts : files.map((file) => ({ path: file.name, file })));
    },
  };
}

/** Add the files of a dropped file or folder. @param {FileSystemEntry} entry @param {string} folder path with a trailing slash @param {FilePart[]} parts extended */
async function searchEntry(entry, folder, parts) {
  const path = folder + entry.name;
  if (entry.isFile) {
    const fileEntry = /** @type {FileSystemFileEntry} */ (entry);
    parts.push({ path, file: await new Promise((resolve, reject) => fileEntry.file(resolve, reject)) });
    return;
  }
  const reader = /** @type {FileSystemDirectoryEntry} */ (entry).createReader();
  for (;;) {
    /** @type {FileSystemEntry[]} */
    const children = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    // Browsers return the entries of a folder in parts, and an empty list at the end.
    if (children.length === 0) return;
    for (const child of children) await searchEntry(child, `${path}/`, parts);
  }
}

/** Return the path of the stack to which a file belongs, and the path of the file in it. @param {FilePart} part @returns {[string, string]} */
function findStack({ path }) {
  const zarr = ZARR_FOLDER_PATTERN.exec(path);
  if (zarr) return [zarr[1], zarr[2]];
  const oif = OIF_PATTERN.exec(path);
  return oif ? [oif[1] + oif[3], oif[2]] : [path, path.split("/").at(-1) ?? path];
}

/** Number files with equal paths. Files from several folders, such as those found by a search, can have the same name. @param {FilePart[]} parts @returns {FilePart[]} */
function numberDuplicates(parts) {
  const paths = new Set();
  return parts.map(({ path: originalPath, file }) => {
    let path = originalPath;
    for (let number = 2; paths.has(path); number += 1)
      path = originalPath.replace(/(\.ome)?(\.[^./]+)?$/i, (suffix) => ` (${number})${suffix}`);
    paths.add(path);
    return { path, file };
  });
}

/** Group the files of OME-Zarr folders and of OIFs, and find the files that are not stacks. @param {FilePart[]} parts @returns {Promise<FoundFile[]>} sorted by path */
async function classifyFiles(parts) {
  /** @type {Map<string, FilePart[]>} */
  const groups = new Map();
  for (const part of numberDuplicates(parts)) {
    const [groupPath, partPath] = findStack(part);
    const group = groups.get(groupPath) ?? [];
    group.push({ path: partPath, file: part.file });
    groups.set(groupPath, group);
  }
  const collator = new Intl.Collator("en", { numeric: true });
  const sortedGroups = [...groups].sort(([first], [second]) => collator.compare(first, second));
  const foundFiles = await Promise.all(
    sortedGroups.map(async ([path, group]) => ({ path, parts: group, skipReason: await findSkipReason(path, group) })),
  );
  const stacks = foundFiles.filter(({ skipReason }) => skipReason === "");
  for (const found of stacks.slice(MAX_STACKS))
    found.skipReason = `A batch can contain up to ${formatCount(MAX_STACKS, "stack")}. Open this file in another batch.`;
  return foundFiles;
}

/** @param {string} path @param {FilePart[]} parts @returns {Promise<string>} why a file is not a stack, "" if it can be one */
async function findSkipReason(path, parts) {
  if (path.split("/").some((name) => SYSTEM_NAME_PATTERN.test(name)))
    return "Created by the operating system or hidden, not a stack.";
  const { file } = parts[0];
  if (parts.length === 1 && file.size === 0) return "The file is empty. Copy or export it again.";
  if (/\.oif$/i.test(path)) return findOifProblem(path, parts);
  if (/\.zarr$/i.test(path) || STACK_SUFFIX_PATTERN.test(path)) return "";
  try {
    const head = new Uint8Array(await file.slice(0, 4).arrayBuffer());
    if (TIFF_SIGNATURES.includes(String.fromCharCode(...head))) return "";
  } catch {
    return "The browser cannot read this file. Check that it still exists and that you may open it.";
  }
  return "Not a supported image format.";
}

/** @param {string} path @param {FilePart[]} parts @returns {string} the advice if a part of an OIF is missing, otherwise "" */
function findOifProblem(path, parts) {
  const name = path.split("/").at(-1) ?? path;
  const hasFile = parts.some((part) => part.path === name);
  if (hasFile && parts.length > 1) return "";
  const missing = hasFile ? `the folder ${name}.files` : `the file ${name}`;
  return `An OIF file and its folder belong together, but ${missing} is missing. Choose the folder that contains both.`;
}

/** Return the content to upload and its name. An OME-Zarr folder or an OIF becomes an archive. @param {string} path @param {FilePart[]} parts @param {AbortSignal} signal @returns {Promise<{content: Blob, name: string}>} */
export async function packStack(path, parts, signal) {
  const name = path.split("/").at(-1) ?? path;
  if (parts.length === 1 && parts[0].path === name) return { content: parts[0].file, name };
  const archive = new ZipWriter();
  for (const part of parts) await archive.add(part.path, part.file, signal);
  return { content: archive.finish(), name: `${name}.zip` };
}
