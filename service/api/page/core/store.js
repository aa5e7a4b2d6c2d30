/** Store for state that several views share. */

/**
 * State that changes only through `set`, which notifies the subscribed listeners.
 * @template {object} State
 */
export class Store {
  /** @param {State} state */
  constructor(state) {
    /** The current state, a new object after each change. @type {Readonly<State>} */
    this.state = state;
    /** @type {Set<(previousState: Readonly<State>) => void>} */
    this.listeners = new Set();
  }

  /** Update the state, and notify the listeners if a value has changed. @param {Partial<State>} changes new values by property name */
  set(changes) {
    const previousState = this.state;
    const nextState = { ...previousState, ...changes };
    if (!hasChanged(previousState, nextState, /** @type {(keyof State)[]} */ (Object.keys(changes)))) return;
    this.state = nextState;
    for (const listener of this.listeners) listener(previousState);
  }

  /** Add a listener. @param {(previousState: Readonly<State>) => void} listener called with the previous state after each change @param {AbortSignal} [signal] ends the subscription */
  subscribe(listener, signal) {
    this.listeners.add(listener);
    signal?.addEventListener("abort", () => this.listeners.delete(listener));
  }
}

/** @template State @param {State} previousState @param {State} currentState @param {(keyof State)[]} names @returns {boolean} whether any property with one of these names differs between the states */
export function hasChanged(previousState, currentState, names) {
  return names.some((name) => previousState[name] !== currentState[name]);
}
