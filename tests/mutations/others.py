"""Mistakes that no test noticed once, each with the test that notices it now."""

from __future__ import annotations

from tests.mutations import mutation

OTHERS = [
    # What earlier backwards have shown is forgotten.
    mutation(
        "test_a_reducer_of_changed_parameters_knows_that_gradients_come_twice",
        "grad/reducer.py",
        "        self._gets_gradients_twice = previous._gets_gradients_twice\n",
        "",
    ),
    # Gradients that nobody has read are dropped with their buckets.
    mutation(
        "test_gradients_that_nobody_has_read_outlive_a_change",
        "grad/reducer.py",
        "        self.sum_unsummed()\n        self._buckets = []",
        "        self._buckets = []",
    ),
    # An evaluation in one thread hides forwards in others.
    mutation(
        "test_what_is_put_in_place_is_named_while_another_thread_evaluates",
        "nn/forward_hooks.py",
        "if is_to_refresh or _may_train_meanwhile():",
        "if is_to_refresh:",
    ),
    # A gradient that isn't copied yet counts as scaled.
    mutation(
        "test_a_gradient_that_is_not_copied_yet_may_come_twice",
        "grad/contents.py",
        "position < now.num_copied)",
        "position <= now.num_copied)",
    ),
    # Scaling is undone twice.
    mutation(
        "test_what_was_scaled_in_a_failed_backward_is_not_scaled_again",
        "grad/contents.py",
        "            now.num_copied = 0\n",
        "",
    ),
    # Gradients to which a failed backward adds nothing are dropped.
    mutation(
        "test_a_gradient_to_which_a_failed_backward_adds_nothing_stays",
        "grad/contents.py",
        "if self.accumulated[position] and any(gradient_of(parameter) is one for one in ours):",
        "if any(gradient_of(parameter) is one for one in ours):",
    ),
    # The last rank's part goes on behind the gradients.
    mutation(
        "test_no_rank_takes_the_norm_of_more_than_the_gradients",
        "grad/deferred.py",
        "return first, min(first + size, numel)",
        "return first, first + size",
    ),
    # What all ranks tell is taken for a failure.
    mutation(
        "test_all_ranks_may_hold_gradients_in_a_backward",
        "grad/facts.py",
        "fact / 4 / num_ranks for fact",
        "fact / num_ranks for fact",
    ),
    # Models that nobody has foreseen come in an order of their own on each rank.
    mutation(
        "test_models_in_one_reentrant_checkpoint_are_reduced_in_one_order",
        "nn/backward.py",
        "late = sorted(backward.late.difference(backward.engines), key=number_of)",
        "late = sorted(backward.late, key=lambda e: e.number * (-1) ** self._group.rank())\n"
        "        late = [one for one in late if one not in backward.engines]",
    ),
    # Gradients that nobody has read are dropped with the reducer.
    mutation(
        "test_gradients_that_nobody_has_read_outlive_a_change",
        "nn/engine.py",
        "            previous.sum_unsummed()\n",
        "",
    ),
    # Buffers of a parallel part are exchanged by the model around it.
    mutation(
        "test_buffers_deep_in_a_parallel_part_have_the_policies_of_that_part",
        "nn/buffers.py",
        "{id(each) for other in leave_out for each in other.modules()}",
        "{id(other) for other in leave_out}",
    ),
    # A mean without weight has a gradient of NaN.
    mutation(
        "test_a_batch_without_weight_adds_nothing_to_gradients",
        "nn/mean.py",
        "slope / torch.where(divisor != 0, divisor, 1)",
        "slope / divisor",
    ),
    # Gradients are kept anew in each step of the others.
    mutation(
        "test_gradients_of_a_rank_that_is_through_are_its_own",
        "nn/join.py",
        "self._restore = self._restore or [*map(",
        "self._restore = [*map(",
    ),
    # Other ranks are told of an abort in place of the failure.
    mutation(
        "test_what_one_rank_gives_up_for_is_the_others_error",
        "comm/transport.py",
        "        if isinstance(error, FAILURES):\n            self.break_off(error)",
        "        if not isinstance(error, FAILURES):\n            self.break_off(error)",
    ),
    # A forked child waits for the other ranks.
    mutation(
        "test_a_forked_child_waits_for_no_rank",
        "comm/transport.py",
        'in a forked child."""\n        self._is_broken = True',
        'in a forked child."""',
    ),
    # A rank that isn't the root multiplies its own values.
    mutation(
        "test_reduce_of_products_leaves_the_values_of_others",
        "comm/collectives.py",
        "else tensor.clone().mul_(reduction.factor)",
        "else tensor.mul_(reduction.factor)",
    ),
    # A parameter that is given twice counts once.
    mutation(
        "test_a_parameter_that_is_given_twice_counts_twice",
        "optim/clip.py",
        "return len(found) == len(ids) == len({*found})",
        "return len(found) == len(ids)",
    ),
    # The program's hooks see the parts of a sharded step.
    mutation(
        "test_hooks_that_were_there_before_see_the_programs_parameters",
        "optim/sharding.py",
        "            post.move_to_end(after.id, last=False)\n",
        "",
    ),
    # An entry of a store takes whatever memory it likes.
    mutation(
        "test_a_note_takes_at_most_twice_its_size",
        "entries.py",
        "if not has_room_for(text):",
        "if False:",
    ),
    # Of another user's file, all is read.
    mutation(
        "test_pages_of_no_runs_size_are_not_shown",
        "observe/attach.py",
        "if not PAGE_BYTES <= size <= self.num_bytes(_MOST_RANKS):",
        "if size > 1 << 32:",
    ),
    # Stacks are asked for in a file that has a name.
    mutation(
        "test_a_file_with_a_name_is_not_emptied",
        "memory_files.py",
        "is_nameless = stat.S_ISREG(found.st_mode) and not found.st_nlink",
        "is_nameless = stat.S_ISREG(found.st_mode)",
    ),
    # Rows of logs are as long as they like.
    mutation(
        "test_a_log_is_continued_in_twice_its_size",
        "observe/logger.py",
        "self._num_left < 0 or self._num_columns >= _MOST_COLUMNS",
        "False",
    ),
    # Nobody hears that a rank has ended.
    mutation(
        "test_rank_that_leaves_before_init_is_named_at_once",
        "launcher/watch.py",
        "            self._host.tell_of_end(rank.rank)\n",
        "            pass\n",
    ),
]
