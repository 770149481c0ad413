"""Bugs to plant in what a scheduler makes of control calls, names, frontends that come and go, and what nobody should send."""

from __future__ import annotations

from tests.scheduler.mutations import Mutation

CONTROL_MUTATIONS = (
    Mutation(
        "a frontend gets the replies of its predecessor",
        "managers/scheduler/scheduler.py",
        "return self._clients.get(client.number) is client",
        "return client.number in self._clients",
    ),
    Mutation(
        "drained though ends are unsent",
        "managers/scheduler/scheduler.py",
        "return self._core.is_idle and all(client.outbox.is_sent for client in self._clients.values())",
        "return self._core.is_idle",
    ),
    Mutation(
        "what a grace cuts off is told only to those who have acknowledged enough",
        "managers/scheduler/scheduler.py",
        "[] if self._core is None else self._send_batches(self._core, is_last=True)",
        "[] if self._core is None else self._send_batches(self._core)",
    ),
    Mutation(
        "continue lifts only its own frontend's pause",
        "managers/scheduler/scheduler.py",
        "self._pauses.end_all()\n                return",
        "self._pauses.end_of(number)\n                return",
    ),
    Mutation(
        "a call to continue is answered before it is recorded",
        "managers/scheduler/scheduler.py",
        'return [*self._changes.record(self._clients), ToFrontend(number, ControlReply(call, True, "", {}))]',
        'return [ToFrontend(number, ControlReply(call, True, "", {}))]',
    ),
    Mutation(
        "an abort by name is not passed on",
        "managers/scheduler/scheduler.py",
        "for other in self._clients if other != number]",
        "for other in self._clients if other < 0]",
    ),
    Mutation(
        "a flush is refused in a pause",
        "managers/scheduler/core.py",
        "if num_running or (num_waiting and not is_paused):",
        "if num_running or num_waiting:",
    ),
    Mutation(
        "a flush is done while some wait",
        "managers/scheduler/core.py",
        "if num_running or (num_waiting and not is_paused):",
        "if num_running:",
    ),
    Mutation(
        "table hashes are not compared",
        "managers/scheduler/worker_stream.py",
        "if found != item.inspection.tables_hash:",
        "if not found:",
    ),
    Mutation(
        "a deep look is answered by the first rank",
        "managers/scheduler/worker_stream.py",
        "return item.inspection if item.num_answers == self._num_ranks else None",
        "return item.inspection",
    ),
    Mutation(
        "ranks may draw other ids",
        "managers/scheduler/worker_stream.py",
        "elif item.ids_hash[1] != ids_hash:",
        "elif item.ids_hash[0] == rank:",
    ),
    Mutation(
        "ranks may differ in their stages",
        "managers/scheduler/worker_stream.py",
        '            "num_stages",\n',
        "",
    ),
    Mutation(
        "two live requests of one name",
        "managers/scheduler/scheduler.py",
        "if self._labels.is_taken(message.label) and not message.resumed:",
        "if self._labels.is_taken(message.label) and message.resumed:",
    ),
    Mutation(
        "a name is free when the first choice has ended",
        "managers/scheduler/clients.py",
        "        if others:\n",
        "        if False:\n",
    ),
    Mutation(
        "a name means all that begin with it",
        "protocol/labels.py",
        'label.startswith(f"{name}_")',
        "label.startswith(name)",
    ),
    Mutation(
        "an id equal to the vocabulary's size is known",
        "managers/scheduler/core.py",
        "if int(unsigned[unsigned.argmax()]) < self._hello.vocab_size:",
        "if int(unsigned[unsigned.argmax()]) <= self._hello.vocab_size:",
    ),
    Mutation(
        "each choice with unknown ids is refused for itself",
        "managers/scheduler/scheduler.py",
        "if reason is None or client is None or request.progress.status is Status.ENDED:",
        "if reason is None or client is None:",
    ),
    Mutation(
        "one choice's stop ends all",
        "managers/tokenizer_manager/request_ledger.py",
        "return [Send(Abort(rid, choice))]",
        "return [Send(Abort(rid, ALL_CHOICES))]",
    ),
    Mutation(
        "what no scheduler has seen is resumed",
        "managers/tokenizer_manager/request_ledger.py",
        "resumed=entry.was_sent,",
        "resumed=True,",
    ),
    Mutation(
        "a conviction ignores the prompt",
        "managers/tokenizer_manager/request_ledger.py",
        "    digest.update(request.prompt_ids.tobytes())\n",
        "",
    ),
    Mutation(
        "a trial is forgotten in a retracting pause",
        "managers/scheduler/trials.py",
        "if request is self._on_trial:",
        "if request.rid < 0:",
    ),
    Mutation(
        "a pause of an unknown kind pauses",
        "managers/scheduler/scheduler.py",
        "        number = client.number\n        if mode not in PAUSE_MODES:",
        "        number = client.number\n        self._pauses.begin(client)\n        if mode not in PAUSE_MODES:",
    ),
    Mutation(
        "a drain can be paused",
        "managers/scheduler/scheduler.py",
        "if not self._is_draining:  #",
        "if True:  #",
    ),
    Mutation(
        "an aborting pause leaves what waits",
        "managers/scheduler/scheduler.py",
        '        if mode == "abort":\n            self.abort_all()',
        '        if mode == "abort":\n            self._abort_live(core.planner.running())',
    ),
    Mutation(
        "a drain takes what is new",
        "managers/scheduler/scheduler.py",
        "if not message.resumed and (refusal :=",
        "if message.urgent and (refusal :=",
    ),
    Mutation(
        "a drain waits for the end of a pause",
        "managers/scheduler/scheduler.py",
        "        self._pauses.end_all()\n        self._is_draining = True",
        "        self._is_draining = True",
    ),
)
