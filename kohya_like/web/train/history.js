// What came before and after in a form.

const MOST = 200;

/** Before and after: each {run, mode, values}, the last of past is what the form holds. */
export class History {
  constructor(now) {
    this.past = [now];
    this.future = [];
  }

  note(now) {
    if (JSON.stringify(now) === JSON.stringify(this.past.at(-1))) return false;
    this.past = [...this.past, now].slice(-MOST);
    this.future = [];
    return true;
  }

  // What the form is to hold; null where there is nothing before it.
  back() {
    if (this.past.length < 2) return null;
    this.future.push(this.past.pop());
    return this.past.at(-1);
  }

  forth() {
    if (!this.future.length) return null;
    this.past.push(this.future.pop());
    return this.past.at(-1);
  }
}
