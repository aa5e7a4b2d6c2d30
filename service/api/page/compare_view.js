/** Two results of one stack side by side: views that go together, and their counts beside each other. */

import { countCommon } from "./agreement.js";
import { element } from "./elements.js";
import { entries } from "./history.js";
import { fetchPlane, fetchVolume, partOf } from "./planes.js";
import { firstTime } from "./series.js";
import { json, queryOf } from "./server.js";
import { Viewer } from "./viewer.js";
import { counted } from "./words.js";

/** @typedef {import("./server.js").Job} Job */
/** @typedef {import("./planes.js").Triple} Triple */

/** @param {import("./history.js").Entry} entry @returns {string} of a result among others of its stack */
export function describeResult(entry) {
  return [entry.model, entry.parameters, counted(entry.objects ?? 0, "object")].filter(Boolean).join(" · ");
}

/** @param {string} stack @returns {import("./history.js").Entry[]} results of it, newest first */
export function resultsOf(stack) {
  return stack ? entries().filter((entry) => entry.stack === stack && entry.objects !== null) : [];
}

/** One of the two results. */
class Side {
  /** @param {Job} job @param {import("./history.js").Entry[]} all @param {(job: string) => void} onchoose */
  constructor(job, all, onchoose) {
    this.job = job;
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
    this.here = element("p", { class: "muted small", "aria-live": "polite" }, "Click an object to see it in both.");
    const count = job.objects === null ? "Classes" : counted(job.objects, "object");
    const facts = [job.model, job.diameter ?? ""].filter(Boolean).join(" · ");
    this.root = element(
      "section",
      { class: "side-by-side", "aria-label": `${job.model}, ${count}` },
      element(
        "header",
        { class: "panel" },
        choice,
        element(
          "div",
          { class: "row between" },
          element("p", { class: "big" }, count),
          element("a", { href: `#job=${job.id}`, class: "muted small", title: facts }, "Open this result"),
        ),
        this.here,
      ),
      views,
    );
    this.viewer = new Viewer(views);
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
    return new Side(job, all, (chosen) => {
      location.hash = `compare=${place === 0 ? [chosen, ids[1]] : [ids[0], chosen]}`;
    });
  });
  const agreement = element("p", { class: "muted", role: "status" }, "Reading the stack");
  root.replaceChildren(
    element("div", { class: "pair" }, ...sides.map((side) => side.root)),
    element("footer", { class: "panel" }, agreement),
  );
  await load(sides, stack, signal);
  agreement.textContent = describeAgreement(sides);
}

/** @param {Side[]} sides @param {string} stack @param {AbortSignal} signal */
async function load(sides, stack, signal) {
  const { model: _model, measurements: _measurements, ...parameters } = sides[0].job.parameters;
  /** @type {import("./server.js").Inspection} */
  const { file } = await json(`inspect?${queryOf({ ...parameters, model: sides[0].job.model.split("/")[0] })}`, {
    method: "POST",
    signal,
  });
  const whole = /** @type {Triple} */ (file.shape.slice(1));
  const time = firstTime(parameters.time);
  const part = partOf(file, parameters, time, /** @type {string | undefined} */ (parameters.channel));
  const address = `stacks/${stack}/planes`;
  const image = await fetchVolume(address, part, whole, signal, () => undefined);
  /** @param {Job} job */
  const pointOf = (job) => ({
    time: job.time_points ? Math.max(0, time - firstTime(job.parameters.time)) : undefined,
  });
  for (const { viewer, job } of sides) {
    viewer.fetchSharp = async (axis, at, sharpening) => {
      const { plane, step } = await fetchPlane(address, part, whole, axis, at, sharpening);
      const labels = await fetchPlane(`jobs/${job.id}/planes`, pointOf(job), whole, axis, at, sharpening);
      return { image: plane, labels: labels.plane, step };
    };
    viewer.open(image, file.voxel_size);
    viewer.settle();
  }
  // Views that have not settled would have the others follow them.
  link(sides);
  for (const { viewer, job } of sides) {
    viewer.setLabels(await fetchVolume(`jobs/${job.id}/planes`, pointOf(job), whole, signal, () => undefined));
  }
}

/** Have the views of both go together, and what is clicked in one shown in the other. @param {Side[]} sides */
function link(sides) {
  for (const [place, { viewer }] of sides.entries()) {
    const other = sides[1 - place];
    viewer.addEventListener("draw", () => other.viewer.follow(viewer));
    viewer.addEventListener("pick", () => {
      other.viewer.follow(viewer);
      other.viewer.select(other.viewer.labelHere());
      for (const side of sides) side.name(side.viewer.scene.selected);
    });
  }
}

/** @param {Side[]} sides */
function describeAgreement([one, other]) {
  const [left, right] = [one.viewer.scene.labels, other.viewer.scene.labels];
  if (!left || !right || left.data.length !== right.data.length) return "The results are of different parts.";
  if (one.job.objects === null || other.job.objects === null) return "";
  const common = countCommon(left, right);
  const [only, others] = [one.job.objects - common, other.job.objects - common];
  return `${counted(common, "object")} in both (they share more than half), ${only} on the left alone, ${others} on the right alone.`;
}
