/** The log of one session: its window, its positions, and what a replay is (CUP, COA). No clock: `now` is passed in. */

import { LIMITS } from "./limits.js";
import { byteLength, type Notification } from "./wire.js";

export interface Event {
  number: number;
  message: Notification;
  bytes: number;
  key: string | null;
  at: number;
}

export type Reason = "no_position" | "unknown_position" | "ahead" | "evicted" | "expired" | "log_replaced" | "no_stream";

let lastEpoch = 0n;

/** 19 digits, and greater for a newer log (EVT8). */
function newEpoch(): string {
  const now = BigInt(Date.now()) * 1_000_000n;
  lastEpoch = now > lastEpoch ? now : lastEpoch + 1n;
  return lastEpoch.toString().padStart(19, "0");
}

export class EventLog {
  head = 0;
  private readonly epoch = newEpoch();
  private events: Event[] = [];
  private bytes = 0;
  // The newest event that was dropped, for want of space and for its age (CUP8).
  private spaceFloor = 0;
  private ageFloor = 0;

  idOf(number: number): string {
    return `${this.epoch}-${String(number).padStart(12, "0")}`;
  }

  /** Stores what `make` says under the next id; an older one with its key makes room (COA1, COA5). */
  append(key: string | null, now: number, make: (id: string) => Notification): Event {
    const number = ++this.head;
    const message = make(this.idOf(number));
    const event: Event = { number, message, bytes: byteLength(message), key, at: now };
    if (key !== null) this.drop((older) => older.key === key);
    this.events.push(event);
    this.bytes += event.bytes;
    this.evict(now);
    return event;
  }

  /** What follows `number`, or null if a part of it is gone (CUP5, ATT10). */
  after(number: number, now: number): Event[] | null {
    this.evict(now);
    return number < this.floor ? null : this.events.filter((event) => event.number > number);
  }

  /** The number of a valid position, or why it is none (CUP8). */
  find(position: string | undefined, now: number): { number: number } | { reason: Reason } {
    this.evict(now);
    if (position === undefined) return { reason: "no_position" };
    const parts = /^([0-9]{19})-([0-9]{12})$/.exec(position);
    if (parts === null) return { reason: "unknown_position" };
    // Epoch before number: a number of another log means nothing here.
    if (parts[1]! > this.epoch) return { reason: "unknown_position" };
    if (parts[1]! < this.epoch) return { reason: "log_replaced" };
    const number = Number(parts[2]);
    if (number > this.head) return { reason: "ahead" };
    if (number < this.spaceFloor) return { reason: "evicted" };
    if (number < this.ageFloor) return { reason: "expired" };
    return { number };
  }

  private get floor(): number {
    return Math.max(this.spaceFloor, this.ageFloor);
  }

  private evict(now: number): void {
    while (this.events.length > 0 && this.events[0]!.at < now - LIMITS.windowAge * 1000) {
      this.ageFloor = this.shift();
    }
    // CUP18: the newest stays.
    while (this.events.length > 1 && (this.events.length > LIMITS.windowEvents || this.bytes > LIMITS.windowBytes)) {
      this.spaceFloor = this.shift();
    }
  }

  private shift(): number {
    const oldest = this.events.shift()!;
    this.bytes -= oldest.bytes;
    return oldest.number;
  }

  // CUP16: what is replaced is not gone, so no floor moves.
  private drop(which: (event: Event) => boolean): void {
    this.events = this.events.filter((event) => {
      if (!which(event)) return true;
      this.bytes -= event.bytes;
      return false;
    });
  }
}

/** COA2 to COA4. */
export function coalescingKey(message: Notification): string | null {
  switch (message.method) {
    case "notifications/resources/updated": {
      const uri = message.params?.["uri"];
      return typeof uri === "string" ? `uri ${uri}` : null;
    }
    case "notifications/tools/list_changed":
    case "notifications/prompts/list_changed":
    case "notifications/resources/list_changed":
      return message.method;
    default:
      return null;
  }
}
