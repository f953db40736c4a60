"""Checks the process group's collectives with tensors whose results every worker knows in advance.

In:  worker r of 4 contributes r + 1 to each element
Out: [] if the sum is 10 everywhere; otherwise a description of each wrong result
"""

import torch
import torch.distributed as dist
from torch import Tensor

ELEMENTS = 4099  # a prime: workers get parts of different lengths


def contribution(rank: int, world: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a worker's contribution to a sum: small integers whose sum over all workers is exact in this data type."""
    places = torch.arange(ELEMENTS, device=device)
    if dtype in (torch.bfloat16, torch.uint8):
        # Whole numbers are exact only up to 256 and 255, so each element gets a number other than 0 from one worker.
        return torch.where(places % world == rank, places % 31 + 1, 0).to(dtype)
    return ((places * 7 + rank * 13) % 31 - 15).to(dtype)


def wrong_collectives(dtypes: list[torch.dtype], device: torch.device, *, is_exact: bool) -> list[str]:
    """Collective: return a description of each collective's wrong result on this worker, by data type.

    With `is_exact`, also check the exchange between two workers, which exact mode uses.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    wrong = []
    for dtype in dtypes:
        of_all = [contribution(other, world, dtype, device) for other in range(world)]
        own = of_all[rank]
        total = torch.stack(of_all).double().sum(0)
        results: dict[str, tuple[Tensor, Tensor]] = {}  # collective → (result, expected)

        summed = own.clone()
        dist.all_reduce(summed)
        results["all-reduce"] = summed, total
        received = own.clone()
        dist.broadcast(received, world - 1)
        results["broadcast"] = received, of_all[-1]
        gathered = torch.empty(world * ELEMENTS, dtype=dtype, device=device)
        dist.all_gather_into_tensor(gathered, own)
        results["all-gather"] = gathered, torch.cat(of_all)
        reduced = own.clone()
        dist.reduce(reduced, 0)
        if rank == 0:
            results["reduce"] = reduced, total
        if is_exact and dtype == torch.float32 and world > 1:
            from pipeline.engine.exact import exchange  # needed only in exact mode

            exchanged = torch.empty_like(own)
            exchange(own, exchanged, rank ^ 1)
            results["exchange with a peer"] = exchanged, of_all[rank ^ 1]

        for name, (result, expected) in results.items():
            differs = result.double() != expected.double()
            if differs.any():
                element = int(differs.nonzero()[0])
                wrong.append(
                    f"the {name} of {str(dtype).removeprefix('torch.')} over {world} workers: {int(differs.sum())} of "
                    f"{len(result)} elements are wrong; element {element} is {float(result[element]):g}, expected "
                    f"{float(expected[element]):g}"
                )
    return wrong
