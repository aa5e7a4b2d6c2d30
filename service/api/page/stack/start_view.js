/** The first screen: a place to drop a stack, the sample, and the jobs of this browser. */

import { button, element } from "../core/elements.js";
import { ago, counted } from "../core/format.js";
import * as kept from "../volumes/correction_store.js";
import { describeCount, entries, forget } from "./recent_jobs.js";

/**
 * @param {HTMLElement} root
 * @param {{open: (file: Blob, name: string) => void, sample: () => void, job: (id: string) => void}} actions
 */
export function showStart(root, actions) {
  const chooser = element("input", {
    type: "file",
    id: "file",
    accept: ".tif,.tiff,.ozx,.zip,image/tiff",
    class: "visually-hidden",
    "aria-label": "A TIFF stack",
    onchange: () => {
      const file = chooser.files?.[0];
      if (file) actions.open(file, file.name);
    },
  });
  const drop = element(
    "section",
    { class: "drop", "aria-label": "Choose a stack" },
    element(
      "div",
      { class: "drop-mark", "aria-hidden": "true" },
      element("img", { src: "page/core/icon.svg", alt: "" }),
    ),
    element("h2", {}, "Drop a TIFF stack here"),
    element(
      "p",
      { class: "muted" },
      "ImageJ, OME-TIFF, BigTIFF or plain pages. It is shown at once; nothing is computed until you say so.",
    ),
    element(
      "div",
      { class: "row" },
      button("Choose a file", () => chooser.click(), "primary"),
      button("Try the sample", actions.sample, "secondary"),
    ),
    chooser,
  );
  acceptDrops(drop, actions.open);
  const list = entries();
  root.replaceChildren(
    drop,
    ...(list.length ? [recent(list, actions.job, () => showStart(root, actions))] : [steps()]),
  );
}

/** Files may be dropped anywhere on the page. @param {HTMLElement} drop @param {(file: Blob, name: string) => void} open */
function acceptDrops(drop, open) {
  document.ondragover = (event) => {
    event.preventDefault();
    drop.classList.add("over");
  };
  document.ondragleave = () => drop.classList.remove("over");
  document.ondrop = (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const file = event.dataTransfer?.files[0];
    if (file) open(file, file.name);
  };
}

function steps() {
  const texts = [
    [
      "Look",
      "Axes, voxel size and channels as the file states them, with the slices and the maximum projection to check them by.",
    ],
    ["Segment", "Every object gets a number. The stack stays on this service; you see how far it is, and may leave."],
    ["Take", "Labels as OME-TIFF, NIfTI or NumPy, a table of volumes and intensities, and the request as a script."],
  ];
  return element(
    "ol",
    { class: "steps" },
    ...texts.map(([name, text]) => element("li", {}, element("h3", {}, name), element("p", { class: "muted" }, text))),
  );
}

/** @param {import("./recent_jobs.js").Entry[]} list @param {(id: string) => void} open @param {() => void} changed */
function recent(list, open, changed) {
  const found = list.map((entry) =>
    element("span", { class: "muted" }, entry.objects === null ? "not finished when last seen" : describeCount(entry)),
  );
  /** Corrections of each job. @type {Map<string, number>} */
  const corrections = new Map();
  kept.counts().then((counts) => {
    for (const [key, edits] of counts) {
      const [job] = key.split("@");
      corrections.set(job, (corrections.get(job) ?? 0) + edits);
    }
    for (const [place, { job }] of list.entries()) {
      const edits = corrections.get(job);
      if (edits) found[place].append(` · ${counted(edits, "correction")}`);
    }
  });
  /** @param {import("./recent_jobs.js").Entry} entry */
  const remove = async ({ job, name }) => {
    const edits = corrections.get(job);
    if (edits && !confirm(`Remove ${name} from this list, and discard its ${counted(edits, "correction")}?`)) return;
    forget(job);
    await kept.forget(job);
    changed();
  };
  return element(
    "section",
    { class: "recent", "aria-labelledby": "recent-title" },
    element("h2", { id: "recent-title" }, "Segmented from this browser"),
    element(
      "ul",
      {},
      ...list.map((entry, place) =>
        element(
          "li",
          {},
          element(
            "button",
            { type: "button", class: "recent-job", onclick: () => open(entry.job) },
            entry.thumbnail.startsWith("data:image/")
              ? element("img", { src: entry.thumbnail, alt: "", width: 96, height: 72 })
              : element("span", { class: "no-picture", "aria-hidden": "true" }),
            element(
              "span",
              { class: "recent-words" },
              element("strong", {}, entry.name || "Stack"),
              found[place],
              element("span", { class: "muted" }, `${entry.model} · ${ago(entry.created)}`),
            ),
          ),
          element(
            "button",
            {
              type: "button",
              class: "quiet icon",
              "aria-label": `Remove ${entry.name || "the stack"} from this list`,
              onclick: () => remove(entry),
            },
            "×",
          ),
        ),
      ),
    ),
  );
}
