/** Section with the plots of a project, which are drawn again when the groups or the width change. */

import { element } from "../core/elements.js";
import { formatCount } from "../core/format.js";
import { request } from "../core/requests.js";
import { drawPlots } from "./plots.js";
import { listGroups } from "./project_requests.js";
import { COLUMNS, parseObjects, summarize } from "./statistics.js";

/** @typedef {import("./project_requests.js").Member} Member */
/** @typedef {import("./statistics.js").Objects} Objects */
/** @typedef {import("./plots.js").Cell} Cell */
/** @typedef {import("./plots.js").Row} Row */

/** The plots show single stacks at first if there are at most this many. */
const MAX_STACKS_SHOWN_AT_FIRST = 40;
const EMPTY_OBJECTS = { volumes: [], intensities: [], unit: "um" };

/** @param {Member} member @returns {boolean} whether the objects of the member are in the table of the project */
export function isMeasured({ kind, available, has_table: hasTable }) {
  return kind === "job" && available && hasTable === true;
}

/** Plots of the objects in the results of a project. It dispatches `load` when the objects have been loaded. */
export class PlotsView extends EventTarget {
  /** @param {string} project id */
  constructor(project) {
    super();
    this.project = project;
    /** @type {Member[]} */
    this.members = [];
    /** Objects by job id, null before they have been loaded. @type {Map<string, Objects> | null} */
    this.objects = null;
    this.loadedJobs = "";
    /** Number of measured results of which the project also has corrected labels. */
    this.correctedCount = 0;
    this.plots = element("div", { class: "plots" });
    this.stacksCheckbox = element("input", { type: "checkbox", onchange: () => this.#draw() });
    this.noteText = element("p", { class: "muted small" });
    this.statusText = element("p", { class: "muted", role: "status" });
    this.root = element(
      "section",
      { class: "card project-plots", "aria-labelledby": "plots-title" },
      element(
        "div",
        { class: "row between" },
        element("h2", { id: "plots-title" }, "Objects"),
        element("label", { class: "inline-label" }, this.stacksCheckbox, "Show each stack"),
      ),
      this.statusText,
      this.plots,
      this.noteText,
    );
    this.width = 0;
    new ResizeObserver(() => {
      if (this.plots.clientWidth !== this.width) this.#draw();
    }).observe(this.plots);
  }

  /** Show the members of the project. The objects are loaded only if the results have changed. @param {Member[]} members */
  async show(members) {
    this.members = members.filter(isMeasured);
    const ids = this.members.map(({ id }) => id);
    this.correctedCount = new Set(
      members.map(({ job }) => job).filter((job) => job !== null && ids.includes(job)),
    ).size;
    const jobs = ids.join();
    this.root.hidden = this.members.length === 0;
    if (jobs !== this.loadedJobs) {
      if (this.objects === null) this.stacksCheckbox.checked = this.members.length <= MAX_STACKS_SHOWN_AT_FIRST;
      this.loadedJobs = jobs;
      this.statusText.textContent = "Loading the measurements";
      const channels = new Map(this.members.map(({ id, channel }) => [id, channel]));
      const table = await (await request(`projects/${this.project}/table?columns=${COLUMNS}`)).text();
      this.objects = parseObjects(table, channels);
      this.statusText.textContent = "";
      this.dispatchEvent(new Event("load"));
    }
    this.#draw();
  }

  #draw() {
    this.width = this.plots.clientWidth;
    if (this.objects === null || this.width === 0 || this.members.length === 0) return;
    const { objects, members } = this;
    const unit = members.some(({ id }) => objects.get(id)?.unit === "um") ? "um" : "voxel";
    const rows = createRows(members, objects, unit, this.stacksCheckbox.checked);
    const panels = [
      { title: "Objects per stack", startsAtZero: true, minStep: 1 },
      { title: `Volume (${unit === "um" ? "µm³" : "voxels"})`, startsAtZero: true, minStep: 0 },
      { title: "Mean intensity (gray values)", startsAtZero: false, minStep: 0 },
    ];
    this.plots.replaceChildren(...drawPlots(panels, rows, this.width));
    this.noteText.textContent = this.#describe(unit);
  }

  /** @param {string} unit of the volumes in the plot */
  #describe(unit) {
    const objects = this.objects ?? new Map();
    const otherCount = this.members.filter(({ id }) => (objects.get(id)?.unit ?? unit) !== unit).length;
    const sentences = [
      "Boxes: half of the objects, with their median. Lines: 5th to 95th percentile. Dots: one stack each, its number or median. The number at the right of a row is the median. Intensities are those of the segmented channel.",
      otherCount > 0 &&
        `${formatCount(otherCount, "stack")} without a voxel size ${otherCount === 1 ? "is" : "are"} not in the plot of volumes.`,
      this.members.some(({ time_points: count }) => count !== null) &&
        "The objects of a time series are counted at each time point.",
      this.correctedCount > 0 &&
        `The project also has corrected labels of ${formatCount(this.correctedCount, "stack")}. The measurements are those before the correction.`,
    ];
    return sentences.filter(Boolean).join(" ");
  }
}

/** Create the rows of the plots: one for each group, each followed by its stacks. @param {Member[]} members @param {Map<string, Objects>} objects @param {string} unit of the volumes @param {boolean} showsStacks @returns {Row[]} */
function createRows(members, objects, unit, showsStacks) {
  const groups = listGroups(members);
  const names = members.some(({ group }) => group === "") ? [...groups, ""] : groups;
  return names.flatMap((name, group) => {
    const stacks = members.filter((member) => member.group === name);
    const parts = stacks.map(({ id }) => objects.get(id) ?? EMPTY_OBJECTS);
    const label = `${name || (groups.length > 0 ? "no group" : "all stacks")} (${stacks.length})`;
    const stackRows = stacks.map((member, index) => createStackRow(member, parts[index], unit, group));
    return [createGroupRow(label, parts, unit, group), ...(showsStacks ? stackRows : [])];
  });
}

/** @param {Objects} objects @param {string} unit @returns {number[]} volumes in this unit */
function getVolumes(objects, unit) {
  return objects.unit === unit ? objects.volumes : [];
}

/** @param {Member} member @param {Objects} objects @param {string} unit @param {number} group @returns {Row} */
function createStackRow(member, objects, unit, group) {
  const count = objects.volumes.length;
  const cells = [
    { bar: count, box: null, dots: [], median: count },
    createDistribution(getVolumes(objects, unit)),
    createDistribution(objects.intensities),
  ];
  return { label: member.name, group, isGroup: false, cells };
}

/** @param {string} label @param {Objects[]} parts of the stacks @param {string} unit @param {number} group @returns {Row} */
function createGroupRow(label, parts, unit, group) {
  const counts = parts.map(({ volumes }) => volumes.length);
  /** @param {number[][]} values of each stack @returns {Cell} */
  const pool = (values) => ({
    ...createDistribution(values.flat()),
    dots: values.map((ownValues) => summarize(ownValues)?.median ?? Number.NaN).filter(Number.isFinite),
  });
  const cells = [
    { bar: null, box: null, dots: counts, median: summarize(counts)?.median ?? null },
    pool(parts.map((part) => getVolumes(part, unit))),
    pool(parts.map(({ intensities }) => intensities)),
  ];
  return { label, group, isGroup: true, cells };
}

/** @param {number[]} values @returns {Cell} */
function createDistribution(values) {
  const box = summarize(values);
  return { bar: null, box, dots: [], median: box?.median ?? null };
}
