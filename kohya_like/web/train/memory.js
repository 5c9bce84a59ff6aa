// The memory that the run in the form would take. Talks with the route /kl/train/memory of kohya_like/tabs/train.py.

import { t } from "../common/language.js";
import { makeMemory } from "../common/memory.js";
import { fill } from "./form.js";
import { drafts, onChange, values } from "./settings.js";

export function memory({ root }) {
  const box = makeMemory(root, {
    prefix: "kl",
    address: "/kl/train/memory",
    gpus: "/kl/train/gpus",
    order: (card) => ({ form: values(), card }),
    use: (plan) => fill(plan.run, { ...drafts[plan.run], ...plan.texts }),
    mayCompute: false,
    nothing: t`No memory option of this kind of run makes it fit; take a smaller base model.`,
  });
  onChange(box.changed);
}
