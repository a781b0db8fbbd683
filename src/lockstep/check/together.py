"""Functions of several samples: which of them the program calls, and all ranks' samples for them.

A mean, a sum, a statistic or BatchNorm takes a rank's own samples, and in one process those of all.
In a trial it takes those of all on the ranks as well.
"""

from __future__ import annotations

import inspect
import sys
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lockstep.check.records import Exchange
from lockstep.comm import bytes_of
from lockstep.errors import LockstepError

BATCH_NORM = "BatchNorm"
MEANS = "means"
SUMS = "sums"
STATISTICS = "statistics"
DRAWS = "draws"
PERMUTATIONS = "permutations"
KINDS = (BATCH_NORM, MEANS, SUMS, STATISTICS, DRAWS, PERMUTATIONS)

T = torch.Tensor
_LOSSES = {
    getattr(F, name)
    for name in (
        *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"),
        *("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss"),
        *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
        *("cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss"),
    )
}
_STATISTICS: set[Any] = {
    *(torch.mean, T.mean, torch.std, T.std, torch.var, T.var, torch.std_mean, torch.var_mean),
    *(torch.amax, T.amax, torch.amin, T.amin, torch.max, T.max, torch.min, T.min),
    *(torch.median, T.median, torch.quantile, T.quantile, torch.sum, T.sum, torch.norm, T.norm),
    *(torch.logsumexp, T.logsumexp, torch.topk, T.topk, torch.kthvalue, T.kthvalue),
    *(torch.softmax, T.softmax, F.softmax, F.log_softmax, torch.log_softmax, T.log_softmax),
}
_PICKS: set[Any] = {torch.topk, T.topk, torch.kthvalue, T.kthvalue}
_MEANS: set[Any] = {torch.mean, T.mean}
_SUMS: set[Any] = {torch.sum, T.sum}
_NORMS: set[Any] = {F.batch_norm, torch.batch_norm}
_DRAWS: set[Any] = {
    *(torch.randn, torch.rand, torch.randint, torch.randn_like, torch.rand_like),
    *(torch.randint_like, torch.normal, torch.bernoulli, T.bernoulli, torch.multinomial),
    *(T.multinomial, T.normal_, T.uniform_, T.bernoulli_, T.random_, T.exponential_),
    *(torch.poisson, T.log_normal_, T.cauchy_, T.geometric_),
}
_PERMUTATIONS: set[Any] = {torch.randperm}
# Arguments that aren't rows of samples.
_NO_ROWS = ("weight", "pos_weight", "self_weight")


class Gathered(torch.autograd.Function):
    """The rows of all ranks, one after the other, differentiated by those of this one."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, parts: list[torch.Tensor], exchange: Exchange, key: str
    ) -> torch.Tensor:
        """Join ``parts``, of which ``local`` is one."""
        before = sum(len(part) for part in parts[: exchange.rank])
        ctx.rows = slice(before, before + len(local))
        ctx.exchange, ctx.key = exchange, key
        return torch.cat([part.to(local.device) for part in parts])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Add up what all ranks' losses say of this one's rows."""
        everyone = ctx.exchange.gather(f"{ctx.key}, backward", gradient.cpu())
        total = torch.stack(everyone).sum(0).to(gradient.device)
        return total[ctx.rows], None, None, None


class Together(TorchFunctionMode):
    """Notes the calls of such functions, or gives those of ``kinds`` the samples of all ranks.

    Args:
        kinds: Those that are to be given them.
        is_active: Whether the program trains, and isn't loading.
        num_rows: The number of samples of the last batch.
        exchange: With the other ranks; None where calls are only noted.
        is_alone: Whether this is the one process, which is given the ranks' random numbers.

    Attributes:
        sites: For each kind, the lines of the program that call such functions.
        drawn: A checksum of the generators' states before numbers for this rank's samples.
    """

    def __init__(
        self,
        kinds: Collection[str],
        is_active: Callable[[], bool],
        num_rows: Callable[[], int],
        exchange: Exchange | None = None,
        *,
        is_alone: bool = False,
    ) -> None:
        super().__init__()
        self._kinds, self._is_active, self._num_rows = kinds, is_active, num_rows
        self._exchange, self._is_alone = exchange, is_alone
        self.sites: dict[str, list[str]] = {}
        self.drawn = 0

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, or what stands for it in this trial."""
        options = kwargs or {}
        if func not in _ALL or not self._is_active():
            return func(*args, **options)
        kind = _kind(func, args, options)
        site = line_of_program() if kind else None
        if not kind or not site:
            return func(*args, **options)
        name = getattr(func, "__name__", str(func))
        named = f"{name} ({site})"
        known = self.sites.setdefault(kind, [])
        if named not in known:
            known.append(named)
        if self._exchange is None or kind not in self._kinds:
            return func(*args, **options)
        if kind in (DRAWS, PERMUTATIONS):
            before = _state(options.get("generator"))
            drawn = func(*args, **options)
            return self._drawn(drawn, before, f"{kind} {site}", self._exchange)
        if self._is_alone:
            return func(*args, **options)
        return self._together(func, args, options, kind, f"{name} {site}")

    def _drawn(self, local: Any, before: bytes, key: str, exchange: Exchange) -> Any:
        """The random numbers ``local``: on ranks as they are, in one process those of the ranks.

        ``before`` is the state of the generator that gave them.
        """
        if not isinstance(local, torch.Tensor):
            return local
        has_rows = local.dim() > 0 and self._num_rows() in (0, len(local))
        if not self._is_alone:
            exchange.tell(key, local.detach().cpu().clone())
            if has_rows:
                self.drawn = zlib.crc32(before, self.drawn)
                return local
            given = exchange.of_first(f"{key}, of the first", local.detach().cpu())
            return _put(local, given)
        parts = [part for part in exchange.told(key) if part is not None]
        if not parts:
            return local
        if not has_rows or all(torch.equal(part, parts[0]) for part in parts):
            return _put(local, parts[0])
        if key.startswith(PERMUTATIONS):
            starts = [sum(map(len, parts[:rank])) for rank in range(len(parts))]
            parts = [part + start for part, start in zip(parts, starts, strict=True)]
        return _put(local, torch.cat(parts))

    def _together(
        self, func: Any, args: tuple[Any, ...], options: dict[str, Any], kind: str, key: str
    ) -> Any:
        """Call ``func`` with all ranks' rows, and return this rank's of the result, if it has any.

        What is the same on all ranks isn't made of samples, and stays as it is.
        """
        exchange = self._exchange
        assert exchange is not None
        named = _named(func, args, options)
        wanted = (0,) if func in _NORMS else range(len(args))
        local: dict[int | str, torch.Tensor] = {
            n: a for n, a in enumerate(args) if n in wanted and _has_rows(a, named.get(n))
        }
        local |= {name: a for name, a in options.items() if _has_rows(a, name)}
        sizes = [a for a in args[1:2] if func in _PICKS and isinstance(a, int)]
        if (
            kind in (MEANS, SUMS) and func in _WHOLE
        ):  # ranks may have padded their batches to different lengths
            local = {name: tensor.reshape(-1) for name, tensor in local.items()}
        facts = ({name: tensor.detach().cpu() for name, tensor in local.items()}, sizes)
        everyone = exchange.gather(key, facts)
        if not local or all(_are_same(each[0], everyone[0][0]) for each in everyone):
            return func(*args, **options)
        full = {
            name: Gathered.apply(  # type: ignore[no-untyped-call]
                tensor, [each[0][name] for each in everyone], exchange, key
            )
            for name, tensor in local.items()
        }
        new = [full.get(number, argument) for number, argument in enumerate(args)]
        if sizes:
            new[1] = sum(each[1][0] for each in everyone)
        result = func(*new, **{name: full.get(name, option) for name, option in options.items()})
        first = next(iter(local))
        lengths = [len(each[0][first]) for each in everyone]
        if isinstance(result, torch.Tensor) and result.dim() and len(result) == sum(lengths):
            start = sum(lengths[: exchange.rank])
            return result[start : start + lengths[exchange.rank]]
        return result


_WHOLE = _MEANS | _SUMS
_ALL = _LOSSES | _STATISTICS | _MEANS | _SUMS | _NORMS | _DRAWS | _PERMUTATIONS


def _kind(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> str | None:
    """What is to be done with a call of ``func``; None for nothing."""
    if func in _DRAWS:
        return DRAWS
    if func in _PERMUTATIONS:
        return PERMUTATIONS
    if func in _NORMS:
        is_training = options.get("training", args[5] if len(args) > 5 else False)
        return BATCH_NORM if is_training else None
    if func in _LOSSES:
        named = inspect.signature(func).bind_partial(*args, **options).arguments
        reduction = named.get("reduction", "mean")
        return {"sum": SUMS, "mean": MEANS, "batchmean": MEANS}.get(reduction)
    tensor = args[0] if args else options.get("input")
    if not isinstance(tensor, torch.Tensor) or not tensor.dim():
        return None
    dims = options.get("dim", options.get("axis", args[1] if len(args) > 1 else None))
    if func in _PICKS:
        return STATISTICS if tensor.dim() == 1 else None
    is_whole = dims is None or isinstance(dims, torch.Tensor | torch.dtype)
    if is_whole and func in _SUMS:
        return SUMS
    if is_whole and func in _MEANS and tensor.requires_grad:
        return MEANS
    listed = dims if isinstance(dims, tuple | list) else (dims,)
    if is_whole or 0 in listed or -tensor.dim() in listed:
        return STATISTICS
    return None


def _named(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> dict[int, str]:
    """The names of the arguments that have one."""
    if func not in _LOSSES:
        return {}
    return dict(enumerate([*inspect.signature(func).parameters][: len(args)]))


def _has_rows(argument: object, name: str | None) -> bool:
    if not isinstance(argument, torch.Tensor) or isinstance(argument, torch.nn.Parameter):
        return False
    return argument.dim() > 0 and name not in _NO_ROWS


def _are_same(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _state(generator: torch.Generator | None) -> bytes:
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return bytes(bytes_of(state))


def _put(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give ``target``, which the program may have written to, the ``value``."""
    if target.shape != value.shape:
        raise LockstepError("One process draws other random numbers than the ranks together.")
    with torch.no_grad():
        target.copy_(value)
    return target


_TORCH = str(Path(torch.__file__).parent)
_MODULE = torch.nn.modules.module.__file__
_PACKAGE = str(Path(__file__).parent.parent)
_CHECK = str(Path(__file__).parent)


def line_of_program() -> str | None:
    """The line of the program that calls what runs now, through torch's modules maybe.

    None for what lockstep itself calls.
    """
    frame: FrameType | None = sys._getframe(1)
    is_in_module = False
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith((_TORCH, "<")):
            is_in_module |= path == _MODULE
        elif path.startswith(_PACKAGE):
            if not is_in_module and not path.startswith(_CHECK):
                return None
        else:
            return f"{Path(path).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return None
