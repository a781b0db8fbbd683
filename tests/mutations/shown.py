"""For each comment "shown by test_x" in the source: what in the code test_x has to notice.

Each is of the line or the guard that the comment is about, and the program stays one that runs: an
error of its own would show nothing.
"""

from __future__ import annotations

from tests.mutations import mutation

SHOWN = [
    mutation(
        "test_gradients_begin_where_those_of_one_process_may_begin",
        "grad/memory.py",
        "_LINE_BYTES = 64",
        "_LINE_BYTES = 8",
    ),
    mutation(
        "test_a_rank_that_was_stopped_gets_no_wrong_sum",
        "comm/transport.py",
        "# Shown by test_a_rank_that_was_stopped_gets_no_wrong_sum.\n        if self._is_broken:",
        "if False:",
    ),
    mutation(
        "test_two_forwards_with_batch_norm_then_two_backwards",
        "comm/any_group.py",
        "stored = [without_repeats(tensor.data) for tensor in chunk]",
        "stored = [without_repeats(tensor.detach()) for tensor in chunk]",
        "if may_write(tensor):",
        "if True:",
    ),
    mutation(
        "test_tensors_of_any_layout_are_sent",
        "comm/arguments.py",
        "if data.numel() < 2:",
        "if False:",
    ),
    mutation(
        "test_ranks_may_come_to_a_second_group_long_after_each_other",
        "comm/backends.py",
        'f"joined/{rank}"',
        '"joined"',
    ),
    mutation(
        "test_store_behind_a_cut_link_is_asked_once",
        "comm/hosts.py",
        "            except RuntimeError:\n                self._store = None\n",
        "            except RuntimeError:\n                pass\n",
    ),
    mutation(
        "test_memory_that_all_ranks_have_mapped_takes_no_descriptor",
        "comm/shm/memory.py",
        "_libc.mmap(None, num_bytes, access, kind, descriptor, start)",
        "_libc.mmap(None, num_bytes, access, kind, os.dup(descriptor), start)",
    ),
    mutation(
        "test_memory_at_the_address_of_dropped_memory_is_known",
        "comm/shm/memory.py",
        "    _libc.munmap(pointer, num_bytes)\n",
        "",
        "    if owner is not None:\n        _shared_at.pop(pointer, None)\n",
        "    _libc.munmap(pointer, num_bytes)\n"
        "    if owner is not None:\n        _shared_at.pop(pointer, None)\n",
    ),
    mutation(
        "test_a_forked_child_calls_no_operator_for_its_memory",
        "comm/shm/memory.py",
        "values = bytes(bytes_of(memory)) if keeps else None",
        "values = memory.clone() if keeps else None",
        "bytes_of(memory)[:] = values",
        "memory.copy_(values)",
    ),
    mutation(
        "test_a_message_is_received_though_its_sender_left_without_reading",
        "comm/shm/memory.py",
        "    except ConnectionResetError:\n",
        "    except ConnectionResetError:\n        raise\n",
    ),
    mutation(
        "test_a_callback_knows_its_rank",
        "comm/threads/ranks.py",
        "before, _current.context = _current.context, known",
        "before = _current.context",
    ),
    mutation(
        "test_torchs_ddp_is_told_of_a_lost_rank",
        "comm/work.py",
        "self._future = self._is_there.then(self._outcome)",
        "self._future = self._is_there",
        "        self._is_there.set_result(None)",
        "        if self._error is None:\n            self._is_there.set_result(self._results)\n"
        "        else:\n            self._is_there.set_exception(self._error)",
    ),
    mutation(
        "test_a_work_that_only_cpp_has_can_be_waited_for",
        "comm/work.py",
        "self._queue.dropped.append(self)",
        "pass",
    ),
    mutation(
        "test_a_rank_that_fails_halfway_spoils_no_later_sum",
        "comm/work.py",
        "self._queue.call_failed(error)",
        "pass",
    ),
    mutation(
        "test_a_wait_for_a_call_is_not_one_for_later_calls",
        "comm/work.py",
        "if self._carrying_out.acquire(True, _TURN_SECONDS):",
        "if self._carrying_out.acquire():",
    ),
    mutation(
        "test_a_callback_may_wait_for_another_calls_future",
        "comm/work.py",
        "            self._runner = self._running = None\n"
        "            self._carrying_out.release()\n",
        "            self._runner = self._running = None\n",
        "            if call is not None:\n                call.tell()\n",
        "            if call is not None:\n                call.tell()\n"
        "            self._carrying_out.release()\n",
    ),
    mutation(
        "test_an_iterable_dataset_in_ranks_that_are_threads",
        "data/iterable.py",
        "        with exclusive:\n            info = get_worker_info()",
        "        if True:\n            info = get_worker_info()",
    ),
    mutation(
        "test_tie_goes_to_the_lower_part",
        "data/partition.py",
        "return next((fraction for fraction in simpler if float(fraction) == size), exact)",
        "return exact",
    ),
    mutation(
        "test_gradient_nobody_touched_keeps_its_bits",
        "grad/contents.py",
        "if gradient is view and not has_grown:",
        "if False:",
    ),
    mutation(
        "test_a_gradient_may_be_replaced_after_its_copy",
        "grad/contents.py",
        "if not all(map(operator.is_, gradients, memory.views)):",
        "if False:",
    ),
    mutation(
        "test_a_program_may_end_with_gradients_unread",
        "grad/deferred.py",
        "if not is_ending():",
        "if True:",
    ),
    mutation(
        "test_an_error_before_the_barrier_of_a_backward_leaves_the_ranks_in_step",
        "comm/shared_buffers.py",
        "if awaited is not None and self._group.generation is awaited[1]:",
        "if False:",
    ),
    mutation(
        "test_a_mismatch_in_one_model_leaves_no_barrier_of_another_one_to_come",
        "comm/shared_buffers.py",
        "if awaited is not None and self._group.generation is awaited[1]:",
        "if awaited is not None:",
    ),
    mutation(
        "test_gradients_of_the_last_step_stay_as_they_were",
        "grad/memory.py",
        "return has_holders and not all(are_current)",
        "return False",
    ),
    mutation(
        "test_buckets_launch_in_index_order",
        "grad/reducer.py",
        "if self._buckets[now.next_launch].now.num_missing or not before.is_hook_done():",
        "if not before.is_hook_done():",
    ),
    mutation(
        "test_two_models_in_one_backward_launch_in_one_order",
        "grad/reducer.py",
        "for reducer in now.launch_order:",
        "for reducer in [self]:",
    ),
    mutation(
        "test_a_backward_that_fails_at_different_places_on_each_rank",
        "grad/reducer.py",
        "self._now.phase, self._now.launch_order = Phase.FAILED, ()",
        "self._pass = None\n        return",
    ),
    mutation(
        "test_hooks_of_several_collectives_keep_their_order",
        "grad/reducer.py",
        "self._buckets[max(0, index - 1)].finish_hook()",
        "pass",
    ),
    mutation(
        "test_ranks_may_have_loops_of_different_lengths",
        "grad/scattered.py",
        "self._is_reduced = True, join_state_of(self.group) is not None",
        "self._is_reduced = True, False",
    ),
    mutation(
        "test_store_that_does_not_answer_is_not_waited_for",
        "launcher/agreement.py",
        "        thread = threading.Thread(target=agree, daemon=True)\n        thread.start()\n",
        "        thread = threading.Thread(target=agree, daemon=True)\n        thread.run()\n",
    ),
    mutation(
        "test_hooks_of_others_see_the_mean",
        "nn/autograd.py",
        "        super().__setitem__(0, hook)\n",
        "        super().__setitem__(0, lambda p: (self.call_others(p), hook(p)))\n",
    ),
    mutation(
        "test_ranks_may_reach_different_models_in_one_backward",
        "nn/backward.py",
        "asks = self._engines.have_to_be_told(self._group, reached)",
        "asks = False",
    ),
    mutation(
        "test_two_models_in_two_groups_launch_in_one_order",
        "nn/backward.py",
        "if sync is not self and len(sync._ranks_on_gpus & self._ranks_on_gpus) > 1",
        "if False",
        delay="lazy",
    ),
    mutation(
        "test_a_failed_backward_does_not_spoil_the_next",
        "nn/backward.py",
        "backward.end = weakref.ref(end, self._fail)",
        "backward.end = weakref.ref(end)",
    ),
    mutation(
        "test_a_buffer_of_another_form_on_a_rank_is_named",
        "nn/buffers.py",
        "if self._forms() != self._agreed:",
        "if False:",
    ),
    mutation(
        "test_a_buffer_that_autograd_has_saved_is_left_alone",
        "nn/buffers.py",
        "broadcast.finish(may_write=self._may_write)",
        "broadcast.finish()",
    ),
    mutation(
        "test_a_buffer_that_autograd_has_saved_is_left_alone",
        "nn/buffers.py",
        "if self._may_write(tensor):",
        "if True:",
    ),
    mutation(
        "test_a_backward_that_needs_an_earlier_value_of_a_view_is_refused",
        "nn/buffers.py",
        "increment_version(tensor)",
        "pass",
    ),
    mutation(
        "test_reentrant_checkpoints_may_begin_after_other_steps",
        "nn/ready_hooks.py",
        "if self._num_nodes in (None, _get_sequence_nr()):",
        "if True:",
    ),
    mutation(
        "test_gradients_of_branches_on_two_streams",
        "nn/ready_hooks.py",
        "self._nodes = autograd.accumulators(",
        "self._nodes = (lambda parameters: [])(",
        delay="2,7",
    ),
    mutation(
        "test_models_may_come_in_any_order_in_no_sync",
        "nn/engine.py",
        "        if self.is_syncing:\n            self.reducer.sum_unsummed()\n",
        "",
    ),
    mutation(
        "test_gradients_of_a_rank_that_is_through_are_its_own",
        "nn/join.py",
        "parameter.grad = gradient",
        "pass",
    ),
    mutation(
        "test_gradients_accumulated_by_a_rank_that_is_through_are_reduced_with_the_others",
        "nn/join.py",
        "None if p.grad is None or is_unreduced else p.grad.clone()",
        "None if p.grad is None else p.grad.clone()",
    ),
    mutation(
        "test_inputs_may_be_modified_in_place",
        "nn/replicas/kept_replica.py",
        "return self._input_leaves[-1].clone()",
        "return self._input_leaves[-1]",
    ),
    mutation(
        "test_statistics_are_those_of_the_last_call",
        "nn/replicas/module_copy.py",
        "object() if id(buffer) in counting else version_of(buffer)",
        "version_of(buffer)",
    ),
    mutation(
        "test_a_loss_and_its_gradient_in_one_backward",
        "nn/replicas/replicas.py",
        "self._shares_graph = self.is_derivative",
        "self._shares_graph = False",
    ),
    mutation(
        "test_a_full_store_is_dropped",
        "world/rendezvous.py",
        "os.dup2(nothing.fileno(), descriptor, inheritable=False)",
        "pass",
    ),
    mutation(
        "test_writes_past_the_count_of_writes_change_nothing",
        "grad/row_bucket.py",
        "view.zero_().index_copy_(0, indices, total.to(view.dtype))",
        "view.index_copy_(0, indices, total.to(view.dtype))",
    ),
    mutation(
        "test_two_updates_on_one_rank_are_an_error_on_all",
        "guarding/context.py",
        "engine.stepped.by[optimizer] = -1",
        "pass",
    ),
    mutation(
        "test_no_graph_of_a_skipped_step_is_left",
        "guarding/blame.py",
        "traceback.clear_frames(each.__traceback__)",
        "pass",
    ),
    mutation(
        "test_buffers_follow_rank_0_behind_a_failed_backward",
        "guarding/context.py",
        "engine.buffers.forget_graphs()",
        "pass",
    ),
    mutation(
        "test_each_stream_that_reads_parameters_waits_for_their_update",
        "optim/arriving.py",
        "if stream.stream_id not in self._streams:",
        "if not self._streams:",
        delay="lazy",
    ),
]
