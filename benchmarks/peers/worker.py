"""A process of one peer's environment: it reads a request in each line and answers with a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch

from ..networks import CASES, Case, perceptron
from ..turns import LEAST
from .adapters import ADAPTERS, OURS, Peer


class Worker:
    def __init__(self, peer: str) -> None:
        self.kind = {**OURS, **ADAPTERS}[peer]
        self.made: dict[str, Peer] = {}

    def samples(self) -> list[int]:
        return list(self.kind.samples)

    def seconds(self, network: str, mode: str, samples: int = 1, rows: int | None = None) -> float:
        """The processor time of a step or of a prediction; what lasts less than a turn is repeated."""
        case = CASES[network]
        x, y = case.data(rows or case.batch)
        if network not in self.made:
            self.made = {network: self.kind(case, 1000)}
            self.made[network].step(x, y)
            self.made[network].finish(x, y)
        peer = self.made[network]
        run = (lambda: peer.step(x, y)) if mode == "training" else (lambda: peer.predict(x, samples))
        repeats, began = 0, time.process_time()
        while repeats == 0 or time.process_time() - began < LEAST:
            run()
            repeats += 1
        return (time.process_time() - began) / repeats

    def quality(self, path: str, epochs: int, batch: int, seed: int) -> dict[str, Any]:
        """Train on the arrays of a file, and predict its test part with each number of samples."""
        with np.load(path) as arrays:
            x, y, x_test, y_test = (torch.from_numpy(arrays[name]) for name in ("x", "y", "x_test", "y_test"))
        classes = None if y.is_floating_point() else int(y.max()) + 1
        hidden = 50 if classes is None else 1200
        outputs, depth = (1, 1) if classes is None else (classes, 2)
        case = Case(lambda: perceptron(x.shape[1], hidden, outputs, depth), x.shape[1:], classes)
        torch.manual_seed(seed)
        began = time.process_time()
        peer = self.kind(case, len(x))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for rows in torch.randperm(len(x), generator=generator).split(batch):
                peer.step(x[rows], y[rows])
            peer.epoch((x, y))
        peer.net.eval()
        peer.finish(x, y)
        trained = time.process_time() - began
        scores = []
        for samples in self.kind.samples:
            began = time.process_time()
            score = peer.log_likelihood(x_test, y_test, samples)
            spent = (time.process_time() - began) / len(x_test)
            scores.append({"samples": samples, "log_likelihood": score, "seconds_per_row": spent})
        return {"training_seconds": trained, "scores": scores}


def main() -> None:
    torch.set_num_threads(1)
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": getattr(worker, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print("\n@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
