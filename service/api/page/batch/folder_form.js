/** Form that starts the segmentation of a folder on the host of the service. */

import { element, field } from "../core/elements.js";
import { showError } from "../core/error_bar.js";
import { buildQuery, requestJson } from "../core/requests.js";
import { SettingsView } from "../stack/settings_view.js";

/** Show the form for a new job. @param {HTMLElement} root @param {import("../stack/session.js").Service} service @param {(job: string) => void} onsubmit called with the id of the submitted job */
export function showFolderForm(root, service, onsubmit) {
  const { inputs, outputs } = service.capabilities;
  const settingsPanel = element("section", { class: "panel batch-settings", "aria-label": "Settings for all stacks" });
  const settings = new SettingsView(settingsPanel, service);
  settings.nameHeading.textContent = "Settings for all stacks";
  const input = createPathInputs("Folder with the stacks", inputs, "2026/embryos");
  const output = createPathInputs("Folder for the results", outputs, "2026/embryos-results");
  const globInput = element("input", { type: "text", placeholder: "**/*.tif", autocomplete: "off" });
  const channelInput = element("input", { type: "text", placeholder: "index or name", autocomplete: "off" });
  const timeInput = element("input", {
    type: "text",
    placeholder: "0, all, or a range such as 2:5",
    autocomplete: "off",
  });
  const overwriteCheckbox = element("input", { type: "checkbox" });
  settings.metadata.root.classList.add("controls");
  settings.metadata.root.append(
    field("Channel to segment", channelInput, createHint("For stacks with several channels")),
    field("Time points", timeInput, createHint("For time series")),
  );
  settings.runButton.textContent = "Segment the folder";
  const showModel = () => {
    const model = settings.models.find(({ name }) => name === settings.parameters.model);
    if (settings.modelSummary) settings.modelSummary.textContent = model?.summary ?? "";
  };
  settings.addEventListener("change", showModel);
  showModel();
  settings.runButton.disabled = false;
  const form = element(
    "section",
    { class: "batch-content folder-form", "aria-label": "Folder on the server" },
    element("h2", {}, "Segment a folder on the server"),
    element(
      "p",
      { class: "muted" },
      "The service reads the stacks and writes the results in folders that its operator has set up. Nothing is uploaded, and you can close this page.",
    ),
    input.root,
    field(
      "Which stacks",
      globInput,
      createHint("A pattern for file names. If it is empty, all stacks directly in the folder are segmented."),
    ),
    output.root,
    element(
      "label",
      { class: "inline-label" },
      overwriteCheckbox,
      "Write the results even if the folder contains other files",
    ),
  );
  settings.addEventListener("run", async () => {
    settings.runButton.disabled = true;
    const parameters = {
      ...settings.parameters,
      channel: channelInput.value.trim(),
      time: timeInput.value.trim(),
      input: input.getPath(),
      output_to: output.getPath(),
      glob: globInput.value.trim(),
      overwrite: overwriteCheckbox.checked || "",
    };
    try {
      /** @type {import("openapi").JobReport} */
      const job = await requestJson(`jobs?${buildQuery(parameters)}`, { method: "POST" });
      onsubmit(job.id);
    } catch (error) {
      showError(error);
    }
    settings.runButton.disabled = false;
  });
  root.replaceChildren(settingsPanel, form);
}

/** Create controls for a path: one of the folders that the operator has set up, and the path below it. @param {string} title @param {string[]} roots @param {string} placeholder */
function createPathInputs(title, roots, placeholder) {
  const rootSelect = element(
    "select",
    { "aria-label": `${title}: location` },
    ...roots.map((name) => element("option", { value: name }, name)),
  );
  const pathInput = element("input", {
    type: "text",
    placeholder,
    autocomplete: "off",
    "aria-label": `${title}: path`,
  });
  return {
    root: element(
      "div",
      { class: "field", role: "group", "aria-label": title },
      element("span", { class: "field-name" }, title),
      element("div", { class: "row tight path-inputs" }, rootSelect, "/", pathInput),
    ),
    getPath: () => {
      const path = pathInput.value.trim().replaceAll(/^\/+|\/+$/g, "");
      return path ? `${rootSelect.value}/${path}` : rootSelect.value;
    },
  };
}

/** @param {string} text */
function createHint(text) {
  return element("span", { class: "muted small" }, text);
}
