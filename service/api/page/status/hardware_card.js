/** Card with the load and memory of the CPU, the GPUs and the devices in use. */

import { element } from "../core/elements.js";
import { formatBytes, formatCount, formatNumber } from "../core/format.js";
import { createTable } from "./card.js";

/** @typedef {import("openapi").DeviceReport} Device */
/** @typedef {import("openapi").GpuStatus} Gpu */
/** @typedef {import("openapi").HostStatus} Cpu */

/** @param {{gpus: Gpu[], cpu: Cpu, devices: Device[], load: number | null}} hardware */
export function createHardwareElements({ gpus, cpu, devices, load }) {
  const deviceStates = devices.map(describeDevice);
  const hasStates = deviceStates.some((state) => state !== "");
  const freeBytes = cpu.memory_available;
  const usedBytes = cpu.memory_total === null || freeBytes === null ? null : cpu.memory_total - freeBytes;
  return [
    element("h3", {}, cpu.name),
    createMeter(
      "Load",
      load,
      cpu.cores,
      load === null ? "" : `${load.toFixed(1)} of ${formatCount(cpu.cores, "core")}`,
    ),
    createMemoryMeter(usedBytes, cpu.memory_total),
    ...gpus.flatMap(createGpuElements),
    createTable(
      "Devices in use",
      ["Device", ...(hasStates ? ["State"] : []), "Running", "Waiting", "Loaded models", "Memory"],
      devices.map(({ name, running, waiting, models, loaded_bytes }, index) => [
        name,
        ...(hasStates ? [deviceStates[index]] : []),
        formatNumber(running),
        formatNumber(waiting),
        models.join(", ") || "none",
        formatBytes(loaded_bytes),
      ]),
    ),
    ...devices.map(({ problem }) => problem !== null && element("p", { class: "warning-text" }, problem)),
  ];
}

/** Describe the state of a device. @param {Device} device @returns {string} "" for a usable device on this host */
function describeDevice({ host, given_back: isReleased, starting, problem }) {
  if (isReleased) return "released while there is no work";
  if (starting) return "starting";
  if (problem !== null) return "not available";
  return host === null ? "" : `on ${host}`;
}

/** @param {Gpu} gpu */
function createGpuElements(gpu) {
  const { utilisation_percent: load, temperature_celsius: temperature, power_watts: power } = gpu;
  const readings = [temperature !== null && `${temperature} °C`, power !== null && `${Math.round(power)} W`].filter(
    Boolean,
  );
  return [
    element("h3", {}, [`GPU ${gpu.index}: ${gpu.name}`, ...readings].join(", ")),
    createMeter("Load", load, 100, `${load}%`),
    createMemoryMeter(gpu.memory_used, gpu.memory_total),
  ];
}

/** @param {number | null} usedBytes @param {number | null} totalBytes */
function createMemoryMeter(usedBytes, totalBytes) {
  return createMeter(
    "Memory",
    usedBytes,
    totalBytes ?? 1,
    `${formatBytes(usedBytes ?? 0)} of ${formatBytes(totalBytes ?? 0)}`,
  );
}

/** @param {string} name @param {number | null} value null if unknown @param {number} max @param {string} text shown next to the meter if the value is known */
function createMeter(name, value, max, text) {
  const isKnown = value !== null;
  const progressBar = element("progress", {
    max: 1,
    value: isKnown ? Math.min(value / max, 1) : 0,
    "aria-label": name,
  });
  return element(
    "div",
    { class: "meter" },
    element("span", { class: "muted" }, name),
    progressBar,
    element("span", {}, isKnown ? text : "–"),
  );
}
