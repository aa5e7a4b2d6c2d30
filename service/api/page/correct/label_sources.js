/** Sources of the labels that the user edits: the labels of a result, or empty labels for a stack that is annotated from nothing. */

import { buildQuery } from "../core/requests.js";
import { getColumn } from "../volumes/object_table.js";
import { countVoxels } from "../volumes/planes.js";
import { getFirstTime } from "../volumes/time_points.js";
import { fetchLabels } from "./full_resolution.js";

/** @typedef {import("../viewer/viewer.js").Viewer} Viewer */
/** @typedef {import("../viewer/scene.js").Volume} Volume */
/** @typedef {Pick<Volume, "data" | "fullShape">} LabelsProperties the type and the shape of labels, whose voxels may not have been fetched */

/**
 * @typedef {object} LabelSource
 * @property {string} id prefix of the keys under which edits are saved in this browser
 * @property {boolean} isEmpty whether the labels contain no objects before the first edit
 * @property {boolean} isSeries whether each time point has its own labels
 * @property {string} model name of the model that computed the labels, or that is to be trained on them
 * @property {(viewer: Viewer) => LabelsProperties | null} getProperties null if there are no labels
 * @property {(viewer: Viewer, time: number, signal: AbortSignal) => Promise<Volume>} fetch fetches the labels before any edit, at full resolution, to be changed in place
 * @property {(time: number) => Map<number, number>} getConfidences returns confidences by id, if they are known
 * @property {(time: number) => Record<string, unknown>} getQuery returns the parameters that select the stack of an annotation
 * @property {(() => Promise<import("openapi").JobReport>) | null} startJob segments the stack to suggest objects, null if no objects are suggested
 * @property {() => string} getFragment returns the URL fragment that opens the labels
 */

/** The labels of a result. @implements {LabelSource} */
export class ResultLabels {
  /** @param {{job: import("openapi").JobReport, stack: string}} result stack: id of the stack, "" if it is no longer stored @param {import("../volumes/object_table.js").Table | null} table of the objects */
  constructor({ job, stack }, table) {
    this.job = job;
    this.stack = stack;
    this.table = table;
    this.id = job.id;
    this.isEmpty = false;
    this.isSeries = Boolean(job.time_points);
    this.model = job.model;
    /** @type {LabelSource["startJob"]} */
    this.startJob = null;
  }

  /** @param {Viewer} viewer */
  getProperties(viewer) {
    return viewer.scene.state.labels;
  }

  /** @param {Viewer} viewer @param {number} time @param {AbortSignal} signal */
  async fetch(viewer, time, signal) {
    const { labels } = viewer.scene.state;
    if (labels === null) throw new Error("This result has no labels to correct.");
    const parameters = this.isSeries ? { time: Math.max(0, time - getFirstTime(this.job.parameters.time)) } : {};
    return fetchLabels(labels, { url: `jobs/${this.job.id}/planes`, parameters }, viewer, signal);
  }

  /** @param {number} time */
  getConfidences(time) {
    const { table } = this;
    if (table === null || !table.columns.has("confidence")) return new Map();
    const [ids, confidences] = [getColumn(table, "label"), getColumn(table, "confidence")];
    const times = table.columns.get("time");
    const rows = [...ids.keys()].filter((row) => times === undefined || times[row] === time);
    return new Map(rows.map((row) => [ids[row], confidences[row]]));
  }

  /** @param {number} time */
  getQuery(time) {
    return { stack: this.stack, job: this.job.id, time: this.isSeries ? time : undefined };
  }

  getFragment() {
    return `job=${this.job.id}`;
  }
}

/** Parameters of a request that select the image of a stack. */
export const SELECTION_NAMES = ["scene", "channel", "time", "axes", "voxel_size", "allow_incomplete"];

/** Empty labels with the shape of the displayed image. @implements {LabelSource} */
export class EmptyLabels {
  /**
   * @param {string} stack id @param {Record<string, unknown>} parameters of a request that select one image @param {string} model name of the model to train
   * @param {LabelSource["startJob"]} startJob segments the image
   */
  constructor(stack, parameters, model, startJob) {
    this.startJob = startJob;
    /** Parameters that select the image. @type {Record<string, unknown>} */
    this.query = { stack };
    for (const name of SELECTION_NAMES) if (parameters[name] !== "") this.query[name] = parameters[name];
    // The voxel size does not change the labels.
    this.id = `annotation:${buildQuery({ ...this.query, voxel_size: undefined })}`;
    this.isEmpty = true;
    this.isSeries = false;
    this.model = model;
  }

  /** @param {Viewer} viewer @returns {LabelsProperties | null} */
  getProperties(viewer) {
    const { image } = viewer.scene.state;
    return image && { data: new Uint16Array(0), fullShape: image.fullShape };
  }

  /** @param {Viewer} viewer @returns {Promise<Volume>} */
  async fetch(viewer) {
    const { image } = viewer.scene.state;
    if (image === null) throw new Error("The stack has not been loaded yet.");
    const { fullShape } = image;
    return { data: new Uint16Array(countVoxels(fullShape)), shape: fullShape, step: [1, 1, 1], fullShape };
  }

  /** @returns {Map<number, number>} */
  getConfidences() {
    return new Map();
  }

  getQuery() {
    return this.query;
  }

  getFragment() {
    const { stack: annotate, ...selection } = this.query;
    return buildQuery({ annotate, ...selection, model: this.model });
  }
}
