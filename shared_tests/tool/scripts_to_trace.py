"""Scripts of users, as text, for tests of `shardiff trace`: sound ones, and some that fail, hang or disagree."""

from __future__ import annotations

TRAINS = """
import os, pickle, sys, warnings
import torch, torch.distributed as dist
import contract, record, shardiff, shardiff_helpers  # its own, all of them
from benchmarks import speed
from contract import size
assert [m.__file__ for m in (contract, record, shardiff, shardiff_helpers, speed)] == [
    os.path.join(sys.path[0], name)
    for name in ("contract.py", "record.py", "shardiff.py", "shardiff_helpers.py", "benchmarks/speed.py")
]
assert sys.path[0] == os.path.dirname(__file__) == os.getcwd(), sys.path
assert not any(name.startswith("shardiff.") for name in sys.modules)
class Kept:
    def __del__(self, write=os.write):
        if vars(self):
            write(2, b"freed at the end\\n")
kept = Kept()  # lives as long as the interpreter
assert type(pickle.loads(pickle.dumps(kept))) is Kept
kept.last = True
warnings.warn("a warning of the script")
assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "3"], sys.argv
dist.init_process_group("gloo")
rank = dist.get_rank()
assert (rank, dist.get_world_size()) == (int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
w = torch.ones(size, requires_grad=True)
for step in range(3):
    loss = (w * rank).sum()
    loss.backward()
    dist.all_reduce(w.grad)
x = torch.full((2,), float(rank))
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
sys.stdout.write(f"trained {x.tolist()}\\n")  # at once, lest two ranks mix their lines
dist.destroy_process_group()
"""
FAILS = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
dist.barrier()
if dist.get_rank() == 1:
    sys.exit(7)
work = dist.all_reduce(torch.ones(4), async_op=True)
raise RuntimeError("late")
"""
SPAWNS = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp
def rank_main(rank):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{os.environ['OTHER_PORT']}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
if __name__ == "__main__":
    import socket
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["OTHER_PORT"] = str(server.getsockname()[1])
    other = mp.get_context("spawn").Process(target=rank_main, args=(1,))
    other.start()
    rank_main(0)
    other.join()
"""
HANGS = """
import os, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    time.sleep(600)
threading.Timer(1, lambda: print("hangs", os.getpid(), file=sys.stderr, flush=True)).start()
dist.all_reduce(torch.ones(4))
"""
DISAGREES = """
import socket
import torch, torch.distributed as dist, torch.multiprocessing as mp
def rank_main(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.broadcast(torch.ones(4), 0)
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)
    print("went on")
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
mp.start_processes(rank_main, (port,), nprocs=2, start_method="fork")
"""
THINKS = """
import os, socket, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
def think():
    time.sleep(600)
def rank_main(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        think()
    dist.all_reduce(torch.ones(4))
with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
mp.start_processes(rank_main, (port,), nprocs=2, start_method="fork")
"""

DDP = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * (1 + dist.get_rank()))  # the replicas part
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
main()
"""
