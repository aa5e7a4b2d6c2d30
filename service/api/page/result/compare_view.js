/** Two results of one stack side by side: views that go together, and their counts beside each other. */

import { element } from "../core/elements.js";
import { counted } from "../core/format.js";
import { json, queryOf } from "../core/requests.js";
import { describeCount, entries } from "../stack/recent_jobs.js";
import { TimeSlider } from "../stack/time_slider.js";
import { valueAt } from "../viewer/scene.js";
import { Viewer } from "../viewer/viewer.js";
import * as kept from "../volumes/correction_store.js";
import { compareObjects } from "../volumes/label_agreement.js";
import { LabelEditor } from "../volumes/label_edit.js";
import { fetchPlane, fetchVolume, partOf } from "../volumes/planes.js";
import { firstTime } from "../volumes/time_points.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../volumes/planes.js").Volume} Volume */

const CLICK = "Click an object to see it in both.";

/** @param {import("../stack/recent_jobs.js").Entry} entry @returns {string} of a result among others of its stack */
export function describeResult(entry) {
  return [entry.model, entry.parameters, describeCount(entry)].filter(Boolean).join(" · ");
}

/** @param {string} stack @returns {import("../stack/recent_jobs.js").Entry[]} results of it, newest first */
export function resultsOf(stack) {
  return stack ? entries().filter((entry) => entry.stack === stack && entry.objects !== null) : [];
}

/** One of the two results. */
class Side {
  /**
   * @param {string} where @param {Job} job @param {import("../stack/recent_jobs.js").Entry[]} all
   * @param {(job: string) => void} onchoose @param {() => void} onchange other labels of the job are shown
   */
  constructor(where, job, all, onchoose, onchange) {
    this.job = job;
    /** As segmented. @type {Volume | null} */
    this.segmented = null;
    /** Of the labels with the corrections of this browser. @type {LabelEditor | null} */
    this.editor = null;
    const known = all.some((entry) => entry.job === job.id);
    const choice = element(
      "select",
      { "aria-label": "Result", onchange: () => onchoose(choice.value) },
      ...(known ? [] : [element("option", { value: job.id }, job.model)]),
      ...all.map((entry) =>
        element("option", { value: entry.job, selected: entry.job === job.id }, describeResult(entry)),
      ),
    );
    const views = element("div", {});
    this.here = element("p", { class: "muted small", "aria-live": "polite" }, CLICK);
    this.count = element("p", { class: "big" });
    this.corrected = element("input", {
      type: "checkbox",
      checked: true,
      onchange: () => {
        this.#show();
        onchange();
      },
    });
    this.corrections = element("span", {});
    this.choice = element("label", { class: "slim small", hidden: true }, this.corrected, this.corrections);
    const facts = [job.model, job.diameter ?? ""].filter(Boolean).join(" · ");
    this.root = element(
      "section",
      { class: "side-by-side", "aria-label": `${where}: ${job.model}` },
      element(
        "header",
        { class: "panel" },
        choice,
        element(
          "div",
          { class: "row between" },
          this.count,
          element("a", { href: `#job=${job.id}`, class: "muted small", title: facts }, "Open this result"),
        ),
        this.choice,
        this.here,
      ),
      views,
    );
    this.viewer = new Viewer(views);
    this.#show();
  }

  /** Show labels. @param {Volume | null} labels as segmented @param {import("../volumes/label_edit.js").Edit[]} edits that this browser keeps of them */
  take(labels, edits) {
    const fine = labels?.step.every((step) => step === 1) && edits.length > 0;
    const editor = labels && fine ? new LabelEditor({ ...labels, data: labels.data.slice() }, [1, 1, 1]) : null;
    this.segmented = labels;
    this.editor = editor?.restore(edits) ? editor : null;
    this.choice.hidden = edits.length === 0;
    this.corrected.hidden = this.editor === null;
    const corrections = counted(edits.length, "correction");
    this.corrections.textContent = this.editor ? `With ${corrections}` : `Without ${corrections}, which Correct shows`;
    this.#show();
  }

  #show() {
    const { job, segmented, viewer } = this;
    const editor = this.corrected.checked ? this.editor : null;
    viewer.setLabels(editor?.labels ?? segmented);
    const through = job.time_points ? ` at ${counted(job.time_points.total, "time point")}` : "";
    const objects = editor && !through ? editor.objects.size : job.objects;
    this.count.textContent = objects === null ? "Classes" : counted(objects, "object") + through;
  }

  /** @param {number} id */
  name(id) {
    this.here.textContent = id === 0 ? "Here: background." : `Here: object ${id}.`;
  }
}

/**
 * @param {HTMLElement} root @param {string[]} ids of two jobs @param {AbortSignal} signal
 */
export async function showCompare(root, ids, signal) {
  /** @type {Job[]} */
  const jobs = await Promise.all(ids.slice(0, 2).map((id) => json(`jobs/${id}`, { signal })));
  const stack = String(jobs[0].parameters.stack ?? "");
  const all = resultsOf(stack);
  const sides = jobs.map((job, place) => {
    const choose = (/** @type {string} */ chosen) => {
      location.hash = `compare=${place === 0 ? [chosen, ids[1]] : [ids[0], chosen]}`;
    };
    return new Side(place === 0 ? "Left" : "Right", job, all, choose, () => {
      agreement.textContent = describeAgreement(sides);
    });
  });
  const agreement = element("p", { class: "muted", role: "status" }, "Reading the stack");
  const times = new TimeSlider();
  root.replaceChildren(
    element("div", { class: "pair" }, ...sides.map((side) => side.root)),
    element("footer", { class: "panel" }, times.root, agreement),
  );
  const { model: _model, measurements: _measurements, ...parameters } = jobs[0].parameters;
  const query = queryOf({ ...parameters, model: jobs[0].model.split("/")[0] });
  /** @type {import("openapi").Inspection} */
  const { file } = await json(`inspect?${query}`, { method: "POST", signal });
  const ranges = jobs.map(timesOf);
  times.show(
    Math.min(...ranges.map(([first]) => first)),
    Math.max(...ranges.map(([, stop]) => stop)),
    firstTime(parameters.time),
  );
  let loading = new AbortController();
  const show = async () => {
    loading.abort();
    loading = new AbortController();
    const own = AbortSignal.any([signal, loading.signal]);
    const part = partOf(file, parameters, times.at, /** @type {string | undefined} */ (parameters.channel));
    try {
      await load(sides, stack, file, part, times.at, own);
      agreement.textContent = describeAgreement(sides);
    } catch (error) {
      if (!own.aborted) agreement.textContent = /** @type {Error} */ (error).message;
    }
  };
  times.addEventListener("change", show);
  await show();
  // Views that have not settled would have the others follow them.
  link(sides);
}

/** @param {Job} job @returns {[number, number]} its first time point, and one beyond its last */
function timesOf({ parameters, time_points: points }) {
  const first = firstTime(parameters.time);
  return [first, first + (points?.total ?? 1)];
}

/**
 * Show a time point on both sides.
 * @param {Side[]} sides @param {string} stack @param {import("openapi").Description} file @param {Record<string, unknown>} part of the stack
 * @param {number} time @param {AbortSignal} signal
 */
async function load(sides, stack, file, part, time, signal) {
  const whole = /** @type {Triple} */ (file.shape.slice(1));
  const source = { address: `stacks/${stack}/planes`, parameters: part, whole };
  const image = await fetchVolume(source, signal, () => undefined);
  for (const side of sides) {
    const { viewer, job } = side;
    const first = viewer.scene.state.image === null;
    const labelled = labelsOf(job, time, whole);
    viewer.sharp.fetch = async (axis, at, sharpening) => {
      const { plane, step } = await fetchPlane(source, axis, at, sharpening);
      const labels = labelled && (await fetchPlane(labelled, axis, at, sharpening));
      return { image: plane, labels: labels?.plane ?? null, step };
    };
    side.take(null, []);
    viewer.open(image, file.voxel_size);
    // Time points are shown with the same contrast.
    if (first) viewer.settle();
    else viewer.refresh();
  }
  for (const side of sides) {
    const labelled = labelsOf(side.job, time, whole);
    side.here.textContent = labelled ? CLICK : `Time point ${time} is not in this result.`;
    if (!labelled) continue;
    const labels = await fetchVolume(labelled, signal, () => undefined);
    const edits = await kept.load(kept.keyOf(side.job, time));
    signal.throwIfAborted();
    side.take(labels, edits);
  }
}

/** @param {Job} job @param {number} time @param {Triple} whole @returns {import("../volumes/planes.js").Source | null} its labels of a time point; null: it has none */
function labelsOf(job, time, whole) {
  const [first, stop] = timesOf(job);
  if (time < first || time >= stop) return null;
  const parameters = { time: job.time_points ? time - first : undefined };
  return { address: `jobs/${job.id}/planes`, parameters, whole };
}

/** Have the views of both go together, and what is clicked in one shown in the other. @param {Side[]} sides */
function link(sides) {
  for (const [place, { viewer }] of sides.entries()) {
    const other = sides[1 - place];
    viewer.addEventListener("draw", () => other.viewer.follow(viewer));
    viewer.addEventListener("pick", () => {
      other.viewer.follow(viewer);
      const { labels, at } = other.viewer.scene.state;
      other.viewer.select(labels === null ? 0 : valueAt(labels, at));
      for (const side of sides) side.name(side.viewer.scene.state.selected);
    });
  }
}

/** Say how far both agree, and give their objects colours that say so. @param {Side[]} sides */
function describeAgreement([one, other]) {
  const [left, right] = [one, other].map(({ viewer }) => viewer.scene.state.labels);
  if (!left || !right) return "";
  if (left.data.length !== right.data.length) return "The results are of different parts.";
  if (one.job.objects === null || other.job.objects === null) return "";
  const { common, counts, entries } = compareObjects(left, right);
  [one, other].forEach(({ viewer }, place) => {
    viewer.scene.set({ entries: entries[place] });
  });
  return `${counted(common, "object")} in both (they share more than half), ${counts[0] - common} on the left alone, ${counts[1] - common} on the right alone. The same colour is the same object; what has no counterpart is grey.`;
}
