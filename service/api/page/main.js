/** The page: which view is shown, and what happens between them. The address after # names the stack or the job. */

import { showKeyButton, startKeyDialog } from "./core/api_key.js";
import { button, byId, element } from "./core/elements.js";
import { size } from "./core/format.js";
import { hideReport, report } from "./core/notices.js";
import { json, Problem, request, upload } from "./core/requests.js";
import { startTheme } from "./core/theme.js";
import { showCompare } from "./result/compare_view.js";
import { offerCorrections } from "./result/lost_result.js";
import { beforeRun } from "./stack/guidance.js";
import { entries, forget, remember } from "./stack/recent_jobs.js";
import { Session } from "./stack/session.js";
import { showStart } from "./stack/start_view.js";
import { watchStatus } from "./status/status_view.js";
import { annotationsList } from "./training/annotations.js";
import { trainingDialog } from "./training/training_dialog.js";
import { trainingsList, watchTraining } from "./training/training_view.js";
import { forget as forgetCorrections } from "./volumes/correction_store.js";

/** @typedef {import("openapi").JobReport} Job */

/** What the service has: its models, parameters and abilities. @type {import("./stack/session.js").Service} */
const service = {
  models: [],
  defaultModel: null,
  parameters: new Set(),
  abilities: { corrections: false, annotations_bytes: 0, training: false, training_problem: null, training_minutes: 0 },
};
/** @type {Session | null} */
let session = null;

/** @param {"start" | "work" | "status" | "learn" | "compare"} which @param {string} title */
function show(which, title) {
  for (const view of ["start", "work", "status", "learn", "compare"]) byId(view).hidden = view !== which;
  byId("home").hidden = which === "start";
  byId("title").textContent = title;
  document.body.classList.remove("busy");
  hideReport();
}

/** @param {Blob} file @param {string} name */
async function openFile(file, name) {
  const giving = new AbortController();
  const bar = element("progress", { max: 1, "aria-label": "Upload" });
  const words = element("p", { class: "muted", role: "status" }, size(file.size));
  const cancel = button("Cancel", () => giving.abort(), "secondary");
  const parts = [element("h2", {}, `Uploading ${name}`), bar, words, cancel];
  byId("start").replaceChildren(element("section", { class: "drop" }, ...parts));
  /** @param {number} share */
  const show = (share) => {
    bar.value = share;
    words.textContent = `${size(file.size * share)} of ${size(file.size)}`;
  };
  try {
    const stack = await upload(file, name, show, giving.signal);
    location.hash = `stack=${stack.id}`;
  } catch (error) {
    showHome();
    report(error);
  }
}

async function openSample() {
  try {
    const sample = await request(`models/${service.defaultModel}/sample`);
    await openFile(await sample.blob(), `${service.defaultModel}-sample.tif`);
  } catch (error) {
    report(error);
  }
}

function showHome() {
  show("start", "Objects in 3D microscopy stacks");
  showStart(byId("start"), { open: openFile, sample: openSample, job: (id) => (location.hash = `job=${id}`) });
  if (service.abilities.corrections) showLearning().catch(report);
}

/** List the annotated stacks and the trainings of the service on the first screen. */
async function showLearning() {
  const { training, training_minutes: most } = service.abilities;
  const improve = training ? () => trainingDialog(most).catch(report) : null;
  const lists = await Promise.all([annotationsList({ improve }), training ? trainingsList() : null]);
  if (!byId("start").hidden) byId("start").append(...lists.filter((list) => list !== null));
}

/** Show the views of a stack. @param {import("./stack/session.js").Stack} stack */
function openSession(stack) {
  const name = stack.name || "stack.tif";
  // The views measure themselves.
  show("work", name);
  return new Session({ ...stack, name }, service, report);
}

/** @param {string} id @param {string | null} model that is chosen, instead of the default one */
async function openStack(id, model) {
  const stack = await json(`stacks/${id}`);
  session = openSession({ id, name: stack.name, bytes: stack.bytes });
  if (model) session.settings.restore({ model });
  byId("side").replaceChildren(beforeRun());
  await session.inspect();
}

/** @param {string} id */
async function openJob(id) {
  /** @type {Job} */
  const job = await json(`jobs/${id}`);
  const { stack: kept, measurements: _, ...parameters } = job.parameters;
  const stack = typeof kept === "string" ? await json(`stacks/${kept}`).catch(() => null) : null;
  if (session === null || stack === null || session.stack !== stack.id) {
    session?.end();
    session = openSession({ id: stack?.id ?? "", name: job.name, bytes: stack?.bytes ?? 0 });
  } else show("work", session.name);
  const opened = session;
  const given = Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, String(value)]));
  opened.settings.restore({ ...given, model: String(parameters.model ?? job.model.split("/")[0]) });
  remember({ job: id, stack: opened.stack, name: job.name, model: job.model, created: job.created });
  const looking = stack ? opened.inspect() : Promise.resolve(opened.settings.lose());
  await Promise.all([looking, opened.follow(id)]);
}

/** @param {string} id @param {AbortSignal} signal */
async function openTraining(id, signal) {
  show("learn", "Training of a model");
  await watchTraining(byId("learn"), id, signal, {
    segment: (annotation, model) => segmentAnnotation(annotation, model).catch(report),
  });
}

/** Open the stack of an annotation with a model; one that is kept no more is sent again. @param {string} id @param {string} model */
async function segmentAnnotation(id, model) {
  const { stack: former, name } = await json(`annotations/${id}`);
  await readModels();
  const kept = former ? await json(`stacks/${former}`).catch(() => null) : null;
  const stack = kept ?? (await upload(await (await request(`annotations/${id}/image`)).blob(), name, () => undefined));
  location.hash = `stack=${stack.id}&model=${encodeURIComponent(model)}`;
}

/** @param {AbortSignal} signal */
async function openStatus(signal) {
  show("status", "Status of the service");
  await watchStatus(byId("status"), signal, readModels);
}

/** @param {string[]} jobs @param {AbortSignal} signal */
async function openCompare(jobs, signal) {
  show("compare", "Two results side by side");
  await showCompare(byId("compare"), jobs, signal);
}

async function readModels() {
  const served = await json("models");
  service.models = served.models;
  service.defaultModel = served.default;
}

/** What refreshes the status until another view is shown. */
let watching = new AbortController();

/** @param {string} kind @param {string} id @param {string | null} model @param {AbortSignal} signal */
async function openView(kind, id, model, signal) {
  if (kind === "status") return openStatus(signal);
  if (kind === "compare" && id) return openCompare(id.split(","), signal);
  if (kind === "job" && id) return openJob(id);
  if (kind === "stack" && id) return openStack(id, model);
  if (kind === "training" && id) return openTraining(id, signal);
  return showHome();
}

async function route() {
  const address = new URLSearchParams(location.hash.slice(1));
  const [kind, id] = address.entries().next().value ?? ["", ""];
  watching.abort();
  watching = new AbortController();
  document.body.classList.add("busy");
  if (kind !== "job") {
    session?.end();
    session = null;
  }
  try {
    await openView(kind, id, address.get("model"), watching.signal);
  } catch (error) {
    document.body.classList.remove("busy");
    if (error instanceof Problem && error.status === 404) {
      history.replaceState(null, "", "#");
      showHome();
      if (kind === "job" && (await loseJob(id))) return;
    }
    report(error);
  }
}

/** Forget a job that the service does not know. @param {string} id @returns {Promise<boolean>} whether corrections of it are offered instead */
async function loseJob(id) {
  const name = entries().find(({ job }) => job === id)?.name ?? "stack.tif";
  const drop = () => {
    forget(id);
    forgetCorrections(id);
    showHome();
  };
  const offered = await offerCorrections(id, name, drop);
  if (!offered) drop();
  return offered;
}

async function start() {
  startTheme(byId("theme"));
  startKeyDialog(byId("key"));
  byId("home").addEventListener("click", () => (location.hash = ""));
  const [document] = await Promise.all([json("openapi.json"), readModels()]);
  /** @type {{name: string}[]} */
  const parameters = document.paths["/jobs"].post.parameters;
  service.parameters = new Set(parameters.map(({ name }) => name));
  if (document.paths["/limits"]) service.abilities = await json("limits");
  showKeyButton(byId("key"));
  // Not before: a change of the address meanwhile would open what `route` opens here once more.
  window.addEventListener("hashchange", route);
  await route();
}

start().catch(report);
