/** Load and memory of the CPU, the GPUs and the devices in use. */

import { element } from "../core/elements.js";
import { formatBytes, formatCount, formatNumber } from "../core/format.js";
import { table } from "./card.js";

/** @typedef {import("openapi").DeviceReport} Device */
/** @typedef {import("openapi").GpuStatus} Gpu */
/** @typedef {import("openapi").HostStatus} Cpu */

/** @param {{gpus: Gpu[], cpu: Cpu, devices: Device[], load: number | null}} hardware */
export function drawHardware({ gpus, cpu, devices, load }) {
  const states = devices.map(describeDevice);
  const hasStates = states.some((state) => state !== "");
  const free = cpu.memory_available;
  const used = cpu.memory_total === null || free === null ? null : cpu.memory_total - free;
  return [
    element("h3", {}, cpu.name),
    meter("Load", load, cpu.cores, load === null ? "" : `${load.toFixed(1)} of ${formatCount(cpu.cores, "core")}`),
    memoryMeter(used, cpu.memory_total),
    ...gpus.flatMap(drawGpu),
    table(
      "Devices in use",
      ["Device", ...(hasStates ? ["State"] : []), "Running", "Waiting", "Loaded models", "Memory"],
      devices.map(({ name, running, waiting, models, loaded_bytes }, index) => [
        name,
        ...(hasStates ? [states[index]] : []),
        formatNumber(running),
        formatNumber(waiting),
        models.join(", ") || "none",
        formatBytes(loaded_bytes),
      ]),
    ),
    ...devices.map(({ problem }) => problem !== null && element("p", { class: "warning-text" }, problem)),
  ];
}

/** Describe the state of a device of a cluster. Returns "" for a usable device of this host. @param {Device} device */
function describeDevice({ host, given_back: isReleased, starting, problem }) {
  if (isReleased) return "released while there is no work";
  if (starting) return "starting";
  if (problem !== null) return "not available";
  return host === null ? "" : `on ${host}`;
}

/** @param {Gpu} gpu */
function drawGpu(gpu) {
  const { utilisation_percent: load, temperature_celsius: temperature, power_watts: power } = gpu;
  const facts = [temperature !== null && `${temperature} °C`, power !== null && `${Math.round(power)} W`].filter(
    Boolean,
  );
  return [
    element("h3", {}, [`GPU ${gpu.index}: ${gpu.name}`, ...facts].join(", ")),
    meter("Load", load, 100, `${load}%`),
    memoryMeter(gpu.memory_used, gpu.memory_total),
  ];
}

/** @param {number | null} used @param {number | null} total bytes */
function memoryMeter(used, total) {
  return meter("Memory", used, total ?? 1, `${formatBytes(used ?? 0)} of ${formatBytes(total ?? 0)}`);
}

/** @param {string} name @param {number | null} value null if unknown @param {number} max @param {string} text */
function meter(name, value, max, text) {
  const isKnown = value !== null;
  const bar = element("progress", { max: 1, value: isKnown ? Math.min(value / max, 1) : 0, "aria-label": name });
  return element(
    "div",
    { class: "meter" },
    element("span", { class: "muted" }, name),
    bar,
    element("span", {}, isKnown ? text : "–"),
  );
}
