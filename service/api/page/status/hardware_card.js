/** Processors, GPUs and devices: their load and memory. */

import { element } from "../core/elements.js";
import { counted, number, size } from "../core/format.js";
import { table } from "./card.js";

/** @typedef {import("openapi").DeviceReport} Device */
/** @typedef {import("openapi").GpuStatus} Gpu */
/** @typedef {import("openapi").CpuStatus} Cpu */

/** @param {{gpus: Gpu[], cpu: Cpu, devices: Device[], load: number | null}} hardware */
export function drawHardware({ gpus, cpu, devices, load }) {
  const states = devices.map(describeDevice);
  const several = states.some((state) => state !== "");
  const free = cpu.memory_available;
  const used = cpu.memory_total === null || free === null ? null : cpu.memory_total - free;
  return [
    element("h3", {}, cpu.name),
    meter("Load", load, cpu.cores, load === null ? "" : `${load.toFixed(1)} of ${counted(cpu.cores, "core")}`),
    memoryMeter(used, cpu.memory_total),
    ...gpus.flatMap(drawGpu),
    table(
      "Devices in use",
      ["Device", ...(several ? ["State"] : []), "Runs", "Waits", "Loaded models", "Memory"],
      devices.map(({ name, running, waiting, models, loaded_bytes }, place) => [
        name,
        ...(several ? [states[place]] : []),
        number(running),
        number(waiting),
        models.join(", ") || "none",
        size(loaded_bytes),
      ]),
    ),
    ...devices.map(({ problem }) => problem !== null && element("p", { class: "warning-text" }, problem)),
  ];
}

/** The state of a device of a cluster; "" of one of this host that can be used. @param {Device} device */
function describeDevice({ host, given_back: given, starting, problem }) {
  if (given) return "given back, until there is work";
  if (starting) return "starting";
  if (problem !== null) return "cannot be used";
  return host === null ? "" : `on ${host}`;
}

/** @param {Gpu} gpu */
function drawGpu(gpu) {
  const { utilisation_percent: load, temperature_celsius: warmth, power_watts: power } = gpu;
  const facts = [warmth !== null && `${warmth} °C`, power !== null && `${Math.round(power)} W`].filter(Boolean);
  return [
    element("h3", {}, [`GPU ${gpu.index}: ${gpu.name}`, ...facts].join(", ")),
    meter("Load", load, 100, `${load} %`),
    memoryMeter(gpu.memory_used, gpu.memory_total),
  ];
}

/** @param {number | null} used @param {number | null} total bytes */
function memoryMeter(used, total) {
  return meter("Memory", used, total ?? 1, `${size(used ?? 0)} of ${size(total ?? 0)}`);
}

/** @param {string} name @param {number | null} value null: not known @param {number} most @param {string} words */
function meter(name, value, most, words) {
  const known = value !== null;
  const bar = element("progress", { max: 1, value: known ? Math.min(value / most, 1) : 0, "aria-label": name });
  return element(
    "div",
    { class: "meter" },
    element("span", { class: "muted" }, name),
    bar,
    element("span", {}, known ? words : "–"),
  );
}
