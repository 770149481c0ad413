"""The rules that simulated worlds are judged by. `World.statistics` counts under `rule: NAME` how often each had something to judge.

A rule counts where its precondition held: where a wrong scheduler would have been caught. What is counted and not named here fails
a test, and so does a rule that has too little to judge in the worlds of the soak.
"""

from __future__ import annotations

PREFIX = "rule: "
LEAST_PER_MILLION = 1000  # steps

RULES: tuple[str, ...] = (
    # ---- fairness.py: who gets a slot, who loses it, what is told
    "admitted in order",  # by arrival, or by priority and aging; not before one that waits and could have been
    "suspects go first",  # nobody is admitted while one waits for its trial
    "the urgent go first",  # before all that came earlier
    "nobody is passed for ever (lpm)",  # by at most 64 later ones
    "the last in rank is preempted",  # of all that run, or one less important than one that comes
    "displaced only by the more important",  # by the threshold
    "nobody is there beyond its time",  # waiting or running, where that is limited
    "turned away only when too many wait",  # and no slot is free
    "what is known is sent",  # to a frontend that has acknowledged enough
    "what is known of the preempted is sent",  # likewise
    "the load is told",  # soon after it has changed
    "the least useful prefix is evicted",  # used longest ago, or least often
    "a prefix is used as often as what follows it",  # or more often
    "what failed is not cached",  # unless others use it
    "no page more than a request can use",
    # ---- fake_worker.py: what a worker silently relies on
    "admitted with its tokens and adjustments",
    "a new server gets the tokens of the old one",  # it goes on behind them
    "the preempted come back with all their tokens",
    "cached pages hold the request's tokens",  # and were written by an earlier plan
    "a page has one writer",
    "no rows without their pages",  # whose page was given to another is in no plan
    "no rows after the end",  # who has ended is in no plan
    "no row after the last token",  # so often is it sampled, and no more
    "each slot once in a plan",
    "a row decodes once in the pipeline",
    "each step of a pipeline has its share of decodes",
    "every stream goes on",  # in each step, or in turn
    "a decode has its place",  # one position is lacking, and there is a page for it
    "rows bring as many ids as a plan allows",  # with pages for all of them
    "rows bring one id where a plan allows no more",  # though the workers could draft
    "a prompt goes on where it was",  # chunk by chunk
    "a prompt samples at its end",  # and nowhere else
    "no more prompt tokens than allowed",  # in a step
    "a prompt stops only for those who stream",  # or at the end of its pages
    "the prefix tree has written pages only",
    "page tables are compared",  # with a hash of the tables as the worker has them
    # ---- fake_window.py: likewise, of layers that see only the last tokens
    "a window's page has one writer",
    "a window's pages hold what its row reads",
    "pages behind windows are given back",
    # ---- server.py: what goes over the links
    "each token is sent once",  # in order, unless it was asked for again
    "cached tokens are told",  # as they were when it was admitted first
    "frontends are not flooded",  # eight batches may be unacknowledged
    "no more plans than may be in flight",
    "prompts do not hold up streams",  # longer than the decode guarantee says
    "captures wait for their time",  # one at a time, and none while others wait for nothing that it brings
    "graphs are captured when that pays",  # as soon as a step misses one, or nobody is there for long
    "trials run alone",
    # ---- resource_rules.py: what requests need on the workers
    "what is needed is prepared",  # at once, if the workers may hold one more
    "resources are prepared in order",  # of being needed
    "the resource used longest ago is released",  # of those that nobody needs, and only to make room
    "who is admitted has its resource",  # on every rank
    "requests fail with their resource",  # if a rank cannot prepare it, or takes too long
    "nobody waits for ever for a resource",
    "what is pinned stays",
    "what is used makes room for what waits",  # after a quarter of a second it takes no new requests
    "no plans in a pause",
    "last words name what is in flight",
    "a worker's fault ends it",
    "nothing is left at the end",  # no page, slot, pin, or request
    # ---- host_process.py: what the scheduler's process does with messages
    "all ranks are sent the same",
    "only the latest process of a frontend is sent anything",
    "who is gone is found when something is sent",  # once, and the scheduler is told
    "the process wakes when time brings something",  # and not before
    "a process that stops tells all ends before",
    "workers are complained of when they are late",  # with the right step and ranks, and never else
    # ---- ledger_frontend.py: what a frontend gets
    "batches come in order",
    "tokens are released once, in order",  # and are those of the reference
    "tokens come with their logprobs",
    "prompts come with their logprobs",
    "each choice ends once, behind its tokens",
    "ends as it must (length)",  # reason, match and count are those of the reference
    "ends as it must (stop)",
    "ends as it must (error)",
    "aborted by somebody",  # who is aborted was to be
    "out of time only where time is limited",
    "refused for a reason (429)",  # waiting room full
    "refused for a reason (503)",  # after a drain has begun
    "refused for a reason (400)",  # too long
    "what lives is resubmitted",  # to a new server
    "what a server died of is a suspect",
    "convicted of two lone deaths",
    "who is aborted by name does not go on",  # whichever frontend was told
    "calls are answered once",
    # ---- clients.py: what a client reads, above the frontend's ledger
    "readers are woken for news",  # in the turn that brings them; who collects, for the end
    "updates bring what is new",  # ids once and in order, figures, rows of logprobs, its prompt's once
    "text is shown as soon as it is certain",  # but for what may become a stop
    "text is whole at the end",  # and the finish is the reference's
    "text ends before a stop (in a string)",  # with the token that completes it
    "text ends before a stop (in a regex)",
    "a stop ends its choice at once",  # the scheduler is told
    "no tokens are shown where none are wanted",
    "who leaves has what came",
    "errors reach their reader last",  # with status, words and Retry-After; behind all tokens
    "times are told",
    "a frontend forgets what has ended",
    "who has read all says nothing more",  # to the scheduler, as it leaves
    "all fail with their engine",  # when it has died for good, or a message could not be taken
    "frontends go to the next scheduler",  # when the last one's link has ended, and are silent until it greets
    "frontends are greeted with the limits",  # once, before all else
    "what ends here is told",  # to the scheduler, of that choice alone
    "calls are answered",  # all, in the end
    "only what was convicted is suspected at once",  # the same prompt, asked for as much
    "what no scheduler has seen is not resumed",  # and what one has seen is
    # ---- control_rules.py: what a scheduler answers
    "states are right",  # against the books that the world keeps of what was said
    "all are told the same load",  # that of the moment
    "ranks with other tables are named",  # and only they
    "a successor gets no reply of its predecessor",
    "flushes are done when nobody runs",
    "flushes are done in a pause",  # that has taken all slots, or aborted all
    "flushes are refused while some run",
    "a pause in place takes no slots",
    "pauses are answered in time",  # when no step is in flight, or generation goes on, with the right word
    "generation goes on after a pause",  # whoever has ended it
    "a pause outlives its scheduler, but not its frontend",
    "what is answered is in the ledger",
    "aborts by name are counted",
    "aborts by name reach all frontends",
    "one live request of a name",
    "taken or refused, as it must be",
    "what is malformed is refused once",
    "unknown ids are refused once",  # also where a part was aborted
    "strangers are rejected",  # who have not said hello
    "drained only when all ends are said",
    "the end of a grace is said to all",
    # ---- hostile.py: workers that contradict themselves, or each other
    "ranks that differ are no replica",
    # ---- verdicts.py: what becomes of processes
    "ready when all are",
    "who is well is not told to end",
    "the right process is named",
    "found in time (blamed)",  # that a process died of a signal, and others speak first
    "found in time (ended)",
    "found in time (failed)",
    "found in time (gibberish)",
    "found in time (killed)",
    "found in time (silent)",
    "found in time (stuck)",
    "found in time (unlinked)",
    "frontends are told why it ends",
    "frontends end first in a stop",
    "nobody is killed before its grace is over",
    "a stop that was asked for ends well",
    "the server ends in time",
    # ---- obligations.py: what a server owes each choice
    "each logprob is sent once",  # in order, since the request came to this server
    "logprobs come with their tokens",  # in the same batch, or before
    "a prompt's logprobs come before its answer",
    "the time in the queue is told",  # from arrival to the first slot
    "lost slots are told",  # as many as were lost
    "no time is up too early",
    "what is overdue ends by itself",  # whether or not anything else happens
    # ---- room.py: what follows from slots and pages
    "admitted where there is room",  # for what it is expected to need
    "the preempted come back where there is room",  # for all that they may need
    "as much is promised as is expected",  # and the forecast is what the last answers say
    "nobody waits where there is room",  # and a slot
    "who may displace does",  # with the next step
    "nobody loses its slot without need",
    "prompts go on",  # one in each step
    "the oldest long prompt goes on",  # likewise
    "short prompts pass long ones",  # for which half of each step is kept
    "who is there is worked on",  # a step is under way
    # ---- prefixes.py: what the prefix cache must have
    "what is there is not computed again",  # of who runs, or has left since anything was evicted
    "what is being computed is waited for",  # until the next plan
    "no more is evicted than is needed",  # and a little
    "who was left later was used later",
    "each hit counts once",
    "tokens of prompts are counted right",  # all, those from the cache, those that are computed again
)
