"""Oxford Flowers-102 (Nilsback and Zisserman 2008), from 102flowers.tgz, imagelabels.mat and setid.mat.

The images are numbered: jpg/image_00001.jpg has the first entry of `labels`, a class from 1 on, in imagelabels.mat;
setid.mat lists the numbers of each split. The two lists hold 1,020 images to train on and as many to validate on, ten a
class; `trainval` are both, the 2,040 that most papers fine-tune on.

    samples(Path("downloads"), "train")     Sample("image_06765", b"\\xff\\xd8…", (0,))

The owners' files name no classes, only their page does, in the order of the ids: NAMES.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from data.archives.images import as_image, tell
from data.archives.members import file_at, first_present, members
from data.archives.published import Published
from data.errors import DataError
from data.index.names import Names, some
from data.index.refusals import Refusals
from data.shards.sources import Sample

PAGE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
IMAGES = ("102flowers.tgz", "102flowers.tar", "jpg")
LABELS = "imagelabels.mat"
SPLITS_FILE = "setid.mat"
LISTS = {"train": ("trnid",), "validation": ("valid",), "trainval": ("trnid", "valid"), "test": ("tstid",)}
SOURCE = "Nilsback and Zisserman 2008; the owners' setid.mat"
PUBLISHED = {
    "train": Published(1_020, 102, SOURCE),
    "validation": Published(1_020, 102, SOURCE),
    "trainval": Published(2_040, 102, SOURCE),
    "test": Published(6_149, 102, SOURCE),
}

# One name after the other, with a stroke between: a name a line would be a hundred lines.
NAMES_BY_ID = (
    "pink primrose|hard-leaved pocket orchid|canterbury bells|sweet pea|english marigold|tiger lily|"
    "moon orchid|bird of paradise|monkshood|globe thistle|snapdragon|colt's foot|king protea|"
    "spear thistle|yellow iris|globe-flower|purple coneflower|peruvian lily|balloon flower|"
    "giant white arum lily|fire lily|pincushion flower|fritillary|red ginger|grape hyacinth|"
    "corn poppy|prince of wales feathers|stemless gentian|artichoke|sweet william|carnation|"
    "garden phlox|love in the mist|mexican aster|alpine sea holly|ruby-lipped cattleya|cape flower|"
    "great masterwort|siam tulip|lenten rose|barbeton daisy|daffodil|sword lily|poinsettia|"
    "bolero deep blue|wallflower|marigold|buttercup|oxeye daisy|common dandelion|petunia|"
    "wild pansy|primula|sunflower|pelargonium|bishop of llandaff|gaura|geranium|orange dahlia|"
    "pink-yellow dahlia?|cautleya spicata|japanese anemone|black-eyed susan|silverbush|"
    "californian poppy|osteospermum|spring crocus|bearded iris|windflower|tree poppy|gazania|"
    "azalea|water lily|rose|thorn apple|morning glory|passion flower|lotus|toad lily|anthurium|"
    "frangipani|clematis|hibiscus|columbine|desert-rose|tree mallow|magnolia|cyclamen|watercress|"
    "canna lily|hippeastrum|bee balm|ball moss|foxglove|bougainvillea|camellia|mallow|"
    "mexican petunia|bromelia|blanket flower|trumpet creeper|blackberry lily"
)
NAMES: Names = tuple(NAMES_BY_ID.split("|"))


def samples(folder: Path, split: str) -> Iterator[Sample]:
    """The images of a split, in the order of the archive; raises DataError where one of its list is not there."""
    numbers: set[int] = set()
    for name in LISTS[split]:
        numbers.update(numbers_in(folder / SPLITS_FILE, name))
    labels = numbers_in(folder / LABELS, "labels")
    archive = first_present(folder, IMAGES, PAGE)
    passed_over = Refusals()
    for member in members(archive):
        key, _, extension = member.base.partition(".")
        digits = key.removeprefix("image_")
        if extension.lower() != "jpg" or not digits.isdigit():
            passed_over.add("file that is no numbered image", member.base)
            continue
        number = int(digits)
        if number not in numbers:
            continue
        if number > len(labels):
            raise DataError(f"{archive}: {member.base}, and {LABELS} has {len(labels)} labels\n  {PAGE}")
        numbers.remove(number)
        image, kind = as_image(member.read(), member.base, passed_over)
        yield Sample(key, image, (labels[number - 1] - 1,), kind)
    tell(archive, passed_over)
    if numbers:
        lacking = [f"image_{number:05d}.jpg" for number in sorted(numbers)]
        raise DataError(f"{archive}: lacks {len(lacking)} images of {split}: {some(lacking)}\n  {PAGE}")


def classes(folder: Path) -> Names:
    """The names on the owners' page, in the order of the ids."""
    return NAMES


def numbers_in(path: Path, name: str) -> list[int]:
    """The whole numbers of an array in a MATLAB file; raises DataError where it has none of this name."""
    from scipy.io import loadmat

    file_at(path, PAGE)
    try:
        content = loadmat(path, variable_names=[name])
        return [int(number) for number in content[name].ravel()]
    # scipy raises whatever its parser stumbles over in a file that is torn.
    except (ValueError, TypeError, KeyError, NotImplementedError, OSError) as error:
        raise DataError(f"{path}: no array {name!r} ({error}); download it again from {PAGE}") from None
