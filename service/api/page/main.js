/** Entry point of the web UI: routing between its views. The URL fragment selects the view, stack or job. */

import { showKeyButton, startKeyDialog } from "./core/api_key.js";
import { button, byId, element } from "./core/elements.js";
import { formatBytes } from "./core/format.js";
import { hideError, showError } from "./core/notices.js";
import { Problem, request, requestJson, upload } from "./core/requests.js";
import { startTheme } from "./core/theme.js";
import { showCompare } from "./result/compare_view.js";
import { offerCorrections } from "./result/missing_result.js";
import { checklist } from "./stack/guidance.js";
import { forgetJob, recentJobs, rememberJob } from "./stack/recent_jobs.js";
import { Session } from "./stack/session.js";
import { showStart } from "./stack/start_view.js";
import { watchStatus } from "./status/status_view.js";
import { annotationsList } from "./training/annotations.js";
import { trainingDialog } from "./training/training_dialog.js";
import { trainingsList, watchTraining } from "./training/training_view.js";
import { forget as forgetCorrections } from "./volumes/correction_store.js";

/** @typedef {import("openapi").JobReport} Job */

/** The models, parameters and abilities of the service. @type {import("./stack/session.js").Service} */
const service = {
  models: [],
  defaultModel: null,
  parameters: new Set(),
  abilities: { corrections: false, annotations_bytes: 0, training: false, training_problem: null, training_minutes: 0 },
};
/** @type {Session | null} */
let session = null;

/** Show one view and hide the others. @param {"start" | "work" | "status" | "training" | "compare"} id @param {string} title */
function showView(id, title) {
  for (const view of ["start", "work", "status", "training", "compare"]) byId(view).hidden = view !== id;
  byId("home").hidden = id === "start";
  byId("title").textContent = title;
  document.body.classList.remove("busy");
  hideError();
}

/** Upload a file and open its stack. @param {Blob} file @param {string} name */
async function openFile(file, name) {
  const uploading = new AbortController();
  const bar = element("progress", { max: 1, "aria-label": "Upload" });
  const progressText = element("p", { class: "muted", role: "status" }, formatBytes(file.size));
  const cancel = button("Cancel", () => uploading.abort(), "secondary");
  const parts = [element("h2", {}, `Uploading ${name}`), bar, progressText, cancel];
  byId("start").replaceChildren(element("section", { class: "drop" }, ...parts));
  /** @param {number} fraction */
  const showProgress = (fraction) => {
    bar.value = fraction;
    progressText.textContent = `${formatBytes(file.size * fraction)} of ${formatBytes(file.size)}`;
  };
  try {
    const stack = await upload(file, name, showProgress, uploading.signal);
    location.hash = `stack=${stack.id}`;
  } catch (error) {
    showHome();
    showError(error);
  }
}

async function openSample() {
  try {
    const sample = await request(`models/${service.defaultModel}/sample`);
    await openFile(await sample.blob(), `${service.defaultModel}-sample.tif`);
  } catch (error) {
    showError(error);
  }
}

function showHome() {
  showView("start", "Objects in 3D microscopy stacks");
  showStart(byId("start"), { open: openFile, sample: openSample, job: (id) => (location.hash = `job=${id}`) });
  if (service.abilities.corrections) showTrainingLists().catch(showError);
}

/** List the annotated stacks and the trainings on the start screen. */
async function showTrainingLists() {
  const { training, training_minutes: maxMinutes } = service.abilities;
  const improve = training ? () => trainingDialog(maxMinutes).catch(showError) : null;
  const lists = await Promise.all([annotationsList({ improve }), training ? trainingsList() : null]);
  if (!byId("start").hidden) byId("start").append(...lists.filter((list) => list !== null));
}

/** Show the views of a stack. @param {import("./stack/session.js").Stack} stack */
function openSession(stack) {
  const name = stack.name || "stack.tif";
  // The views read their size from the layout, so they have to be visible.
  showView("work", name);
  return new Session({ ...stack, name }, service, showError);
}

/** @param {string} id @param {string | null} model selected instead of the default model */
async function openStack(id, model) {
  const stack = await requestJson(`stacks/${id}`);
  session = openSession({ id, name: stack.name, bytes: stack.bytes });
  if (model) session.settings.restore({ model });
  byId("side").replaceChildren(checklist());
  await session.inspect();
}

/** Open a job with its stack, if the service still stores the stack. @param {string} id */
async function openJob(id) {
  /** @type {Job} */
  const job = await requestJson(`jobs/${id}`);
  const { stack: stackId, measurements: _, ...parameters } = job.parameters;
  const stack = typeof stackId === "string" ? await requestJson(`stacks/${stackId}`).catch(() => null) : null;
  if (session === null || stack === null || session.stack !== stack.id) {
    session?.end();
    session = openSession({ id: stack?.id ?? "", name: job.name, bytes: stack?.bytes ?? 0 });
  } else showView("work", session.name);
  const current = session;
  const texts = Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, String(value)]));
  current.settings.restore({ ...texts, model: String(parameters.model ?? job.model.split("/")[0]) });
  rememberJob({ job: id, stack: current.stack, name: job.name, model: job.model, created: job.created });
  const inspection = stack ? current.inspect() : Promise.resolve(current.settings.showMissingStack());
  await Promise.all([inspection, current.follow(id)]);
}

/** @param {string} id @param {AbortSignal} signal */
async function openTraining(id, signal) {
  showView("training", "Model training");
  await watchTraining(byId("training"), id, signal, {
    segment: (annotation, model) => segmentAnnotation(annotation, model).catch(showError),
  });
}

/** Open the stack of an annotation with a model. Upload its image again if the stack has expired. @param {string} id @param {string} model */
async function segmentAnnotation(id, model) {
  const { stack: stackId, name } = await requestJson(`annotations/${id}`);
  await readModels();
  const stored = stackId ? await requestJson(`stacks/${stackId}`).catch(() => null) : null;
  const stack =
    stored ?? (await upload(await (await request(`annotations/${id}/image`)).blob(), name, () => undefined));
  location.hash = `stack=${stack.id}&model=${encodeURIComponent(model)}`;
}

/** @param {AbortSignal} signal */
async function openStatus(signal) {
  showView("status", "Service status");
  await watchStatus(byId("status"), signal, readModels);
}

/** @param {string[]} jobs @param {AbortSignal} signal */
async function openCompare(jobs, signal) {
  showView("compare", "Compare two results");
  await showCompare(byId("compare"), jobs, signal);
}

async function readModels() {
  const response = await requestJson("models");
  service.models = response.models;
  service.defaultModel = response.default;
}

/** Ends the requests of the current view when another view opens. */
let viewAbort = new AbortController();

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
  viewAbort.abort();
  viewAbort = new AbortController();
  document.body.classList.add("busy");
  if (kind !== "job") {
    session?.end();
    session = null;
  }
  try {
    await openView(kind, id, address.get("model"), viewAbort.signal);
  } catch (error) {
    document.body.classList.remove("busy");
    if (error instanceof Problem && error.status === 404) {
      history.replaceState(null, "", "#");
      showHome();
      if (kind === "job" && (await handleMissingJob(id))) return;
    }
    showError(error);
  }
}

/** Remove a job that the service no longer has, or offer its corrections. @param {string} id @returns {Promise<boolean>} whether corrections are offered */
async function handleMissingJob(id) {
  const name = recentJobs().find(({ job }) => job === id)?.name ?? "stack.tif";
  const discard = () => {
    forgetJob(id);
    forgetCorrections(id);
    showHome();
  };
  const hasCorrections = await offerCorrections(id, name, discard);
  if (!hasCorrections) discard();
  return hasCorrections;
}

async function start() {
  startTheme(byId("theme"));
  startKeyDialog(byId("key"));
  byId("home").addEventListener("click", () => (location.hash = ""));
  const [document] = await Promise.all([requestJson("openapi.json"), readModels()]);
  /** @type {{name: string}[]} */
  const parameters = document.paths["/jobs"].post.parameters;
  service.parameters = new Set(parameters.map(({ name }) => name));
  if (document.paths["/limits"]) service.abilities = await requestJson("limits");
  showKeyButton(byId("key"));
  // Listen only now: an earlier change of the fragment would make `route` open the same view twice.
  window.addEventListener("hashchange", route);
  await route();
}

start().catch(showError);
