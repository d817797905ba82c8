"""Pet names: an LSTM learns a list of names letter by letter and makes up new ones.

Any text file with a name on each line, or a JSON file with a list of names.
"""

import json
import math
import unicodedata
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset

from flows.options import PetNamesData, PetNamesTraining
from prefect_torch_ddp import (
    ClassificationMeter,
    InvalidParamsError,
    RankContext,
    Report,
    read_options,
    storage_from_uri,
)
from prefect_torch_ddp.data import read_files, seeded_split
from prefect_torch_ddp.examples.schedules import num_steps, renew_options

LONGEST, FEWEST = 60, 2
ADDRESSES = ("https://", "http://")
ANSWER_S = 60
END, NO_LETTER = 0, -100


class Options(PetNamesTraining, PetNamesData):
    """All options of a run. The run's source is the folder of the list."""


def prepare(ctx: RankContext) -> None:
    """Write the names, each once whatever its case, their split and their alphabet."""
    options = read_options(Options, ctx.options)
    names, dropped = names_in(content_of(ctx, options.file), options.file)
    print(f"{len(names)} names; dropped {len(dropped)}: {', '.join(map(repr, dropped)) or 'none'}")
    train, test = seeded_split(len(names), options.held_out, options.split_seed)
    content = {
        "train": [names[i] for i in train],
        "test": [names[i] for i in test],
        "alphabet": sorted(set("".join(names))),
        "dropped": dropped,
    }
    (ctx.data / "names.json").write_text(json.dumps(content), encoding="utf-8")


def train(ctx: RankContext) -> dict[str, int | str]:
    """Train with AdamW on a falling rate; recurrent nets need the gradient's norm clipped.

    The returned value is in the model's card, from which `names_of` takes its alphabet.
    """
    options = read_options(Options, ctx.options)
    data = json.loads((ctx.data / "names.json").read_text(encoding="utf-8"))
    model = ctx.wrap(make_net(options, len(data["alphabet"])))
    loader = ctx.loader(
        letters(data["train"], data["alphabet"]), global_batch_size=options.global_batch_size
    )
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    ctx.track(model=model, optimizer=optimizer)
    renew_options(optimizer)
    total = num_steps(ctx, optimizer, epochs=options.epochs, num_batches=len(loader))
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # half a cosine, at the step of the checkpoint
        optimizer,
        lambda step: (1 + math.cos(math.pi * min(step / total, 1))) / 2,
        last_epoch=ctx.step - 1,
    )

    for given, wanted in ctx.steps(loader, epochs=options.epochs):
        logits, _ = model(given.to(ctx.device))
        losses = cross_entropy(
            logits.mT, wanted.to(ctx.device), ignore_index=NO_LETTER, reduction="none"
        )
        num_letters = (wanted != NO_LETTER).sum(1).to(ctx.device)
        loss = (losses.sum(1) / num_letters).mean()  # a short name counts like a long one
        optimizer.zero_grad()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss, gradient_norm=norm)
    return {
        "num_names": len(data["train"]),
        "num_dropped": len(data["dropped"]),
        "alphabet": "".join(data["alphabet"]),
    }


@torch.no_grad()
def evaluate(ctx: RankContext) -> Report:
    """Score the letters of held-out names; save new_names.txt, names that are on no list."""
    options = read_options(Options, ctx.options)
    data = json.loads((ctx.data / "names.json").read_text(encoding="utf-8"))
    net = make_net(options, len(data["alphabet"])).to(ctx.device)
    ctx.track(model=net)
    net.eval()
    meter = ClassificationMeter(["the end", *data["alphabet"]])
    held_out = letters(data["test"], data["alphabet"])
    for given, wanted in ctx.loader(held_out, global_batch_size=256, shuffle=False):
        is_letter = wanted != NO_LETTER
        meter.update(net(given.to(ctx.device))[0][is_letter.to(ctx.device)], wanted[is_letter])
    scores = meter.report()
    new = make_up(net.cpu(), data["alphabet"], data["train"] + data["test"], options, ctx.seed)
    if ctx.rank == 0:
        ctx.save("new_names.txt", "".join(f"{name}\n" for name in new))
        print(f"{len(new)} of {options.num_new} new names: {', '.join(new)}")
    return Report(
        num_samples=scores.num_samples,
        accuracy=scores.accuracy,
        loss=scores.loss,
        metrics={"new_names": len(new)},
        texts={"New names": ", ".join(new)},
    )


class NameNet(nn.Module):
    """Letters int64 [n, length] to logits of each next one [n, length, letters + 1] and state."""

    def __init__(
        self, num_letters: int, hidden: int, dropout: float = 0.0, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_letters + 1, 32)
        between = dropout if layers > 1 else 0.0  # torch warns of one that drops nothing
        self.lstm = nn.LSTM(32, hidden, num_layers=layers, batch_first=True, dropout=between)
        self.head = nn.Linear(hidden, num_letters + 1)

    def forward(
        self, given: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Foresee the letters."""
        outputs, state = self.lstm(self.embedding(given), state)
        return self.head(outputs), state


def make_net(options: Options, num_letters: int) -> NameNet:
    """Make the net that the options describe."""
    return NameNet(num_letters, options.hidden, options.dropout, options.layers)


def content_of(ctx: RankContext, file: str) -> bytes:
    """Read the list: from an address, by a path or a URI, or from the run's source.

    Raises:
        InvalidParamsError: it isn't there.
    """
    if file.startswith(ADDRESSES):
        try:
            with urllib.request.urlopen(file, timeout=ANSWER_S) as answer:  # noqa: S310 - see ADDRESSES
                return bytes(answer.read())
        except OSError as error:
            msg = f"{file} can't be read: {error}; give the list's address in data_options"
            raise InvalidParamsError(msg) from error
    is_elsewhere = "://" in file or Path(file).expanduser().is_absolute()
    folder, _, name = file.rpartition("/") if is_elsewhere else ("", "", file)
    source = storage_from_uri(folder or "/") if is_elsewhere else ctx.source
    files = dict(read_files(source, name))
    if name not in files:
        msg = (
            f"{source.uri} has no {name}; name the list by "
            "data_options={'file': ...}, its folder by source"
        )
        raise InvalidParamsError(msg)
    return files[name]


class Names(NamedTuple):
    """What a list has."""

    names: list[str]
    """Each as it is first written."""
    dropped: list[str]
    """Lines that are empty, and names that are there already, as they are written."""


def names_in(content: bytes, file: str) -> Names:
    """Read a list.

    Raises:
        InvalidParamsError: it isn't UTF-8, or no JSON list of texts; it has a long line, or too
            few names.
    """
    try:
        text = unicodedata.normalize("NFC", content.decode("utf-8-sig"))
        path = urlsplit(file).path if file.startswith(ADDRESSES) else file
        lines = json.loads(text) if path.endswith(".json") else text.splitlines()
    except UnicodeDecodeError as error:
        msg = f"{file} is no UTF-8 text ({error}); save it as UTF-8, a name on each line"
        raise InvalidParamsError(msg) from error
    except json.JSONDecodeError as error:
        msg = f'{file} is no JSON ({error}); give a list of names, ["Bello", "Rex"]'
        raise InvalidParamsError(msg) from error
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        msg = f'{file} is no list of texts; give a list of names, ["Bello", "Rex"]'
        raise InvalidParamsError(msg)
    names: dict[str, str] = {}
    dropped: list[str] = []
    for line in lines:
        name = " ".join(line.split())
        if len(name) > LONGEST:
            msg = (
                f"{file} has a line of {len(name)} characters, {name[:40]!r}...; "
                f"give a name of at most {LONGEST} on each line"
            )
            raise InvalidParamsError(msg)
        if not name or name.casefold() in names:
            dropped.append(name)
        else:
            names[name.casefold()] = name
    if len(names) < FEWEST:
        msg = f"{file} has {len(names)} names; give at least {FEWEST}, each on its own line"
        raise InvalidParamsError(msg)
    return Names(list(names.values()), dropped)


def letters(names: Sequence[str], alphabet: Sequence[str]) -> TensorDataset:
    """Return int64 [names, length]: given letters from the start, wanted ones to the end."""
    wanted = torch.full((len(names), max(map(len, names)) + 1), NO_LETTER)
    for row, name in zip(wanted, names, strict=True):
        row[: len(name) + 1] = torch.tensor([*(alphabet.index(letter) + 1 for letter in name), END])
    given = wanted.roll(1, dims=1).index_fill(1, torch.tensor([0]), END).clamp(min=END)
    return TensorDataset(given, wanted)


def make_up(
    net: nn.Module, alphabet: Sequence[str], known: Sequence[str], options: Options, seed: int
) -> list[str]:
    """Draw names that are not known in any case; at most a hundred tries for each."""
    generator = torch.Generator().manual_seed(seed)
    new: list[str] = []
    taken = {name.casefold() for name in known}
    for _ in range(100 * options.num_new):
        name, given, state = "", END, None
        while len(name) < LONGEST:
            logits, state = net(torch.tensor([[given]]), state)
            odds = (logits[0, 0] / options.temperature).softmax(0)
            if (given := int(torch.multinomial(odds, 1, generator=generator))) == END:
                break
            name += alphabet[given - 1]
        name = " ".join(name.split())
        if name and name.casefold() not in taken:
            taken.add(name.casefold())
            new.append(name)
        if len(new) == options.num_new:
            break
    return new


@torch.no_grad()
def names_of(model_uri: str, num: int = 50, seed: int = 0) -> list[str]:
    """Make up names with only an exported model: its weights, and the card next to them.

    Args:
        model_uri: of model.safetensors, a path or an s3:// URI, as a run's report has it.
        num: how many names.
        seed: other names for another seed.
    """
    folder, _, file = model_uri.rpartition("/")
    storage = storage_from_uri(folder)
    card = json.loads(storage.read(file.replace(".safetensors", ".json")))
    options = read_options(Options, {**card["options"], "num_new": num})
    alphabet = list(card["value"]["alphabet"])
    net = make_net(options, len(alphabet)).eval()
    net.load_state_dict(safetensors.torch.load(storage.read(file)))
    return make_up(net, alphabet, [], options, seed)
