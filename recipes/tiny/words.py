"""The words that the synthetic text is made of, written for this project, and words that mean nothing but can be pronounced."""

from __future__ import annotations

import random
import re
from pathlib import Path

NOUNS = tuple(
    """
    acorn almond anchor ant apple apron arrow attic autumn axe badge bag baker ball balloon banana barn barrel basin basket bat bath
    beach bead bean bear bed bee bell belt bench berry bike bird biscuit blanket board boat bone book boot bottle bowl box branch bread
    brick bridge broom brush bucket bus bush butter button cabin cable cactus cage cake camel camera candle canoe cap car card carpet
    carrot castle cat cave chain chair chalk cheese cherry chest chicken clock cloud clover coat coffee coin comb cookie copper corn
    cotton cow crab cradle crane crow crown cup curtain daisy deer desk dish dog doll donkey door dove dragon drawer dress drum duck
    eagle ear egg elbow engine eraser eye falcon fan farm feather fence fern field fig finger fire fish flag flame floor flower flute
    fog fork fox frog fruit garden garlic gate ghost giraffe glass glove goat gold goose grape grass guitar hail hammer hand harbor hare
    harp hat hawk heart hedge helmet hen hill hive honey hook horn horse house ice igloo ink iron island ivy jacket jam jar jelly jewel
    jungle kettle key king kite kitten knee knife ladder lake lamb lamp lantern leaf lemon letter light lily lime lion lizard lock log
    magnet map maple mask match meadow melon milk mill mint mirror mitten moon moth motor mouse mud mushroom nail napkin needle nest net
    newt night nose nut oak ocean olive onion orange orchard otter oven owl paint palace pan panda paper park parrot path peach pear
    pebble pen pencil penguin pepper piano pickle pie pig pillow pine pipe pizza plane plate plum pocket pond pony pool pot potato
    prince puddle pump pumpkin puppet puzzle quail quartz queen quilt rabbit radio raft rain rake raven ribbon rice ring river road
    robin rock roof room root rope rose ruler sail salad salt sand sandal saw scarf school seal seed shark shed sheep shell ship shirt
    shoe shovel silk silver sink skirt sky sled snail snake snow soap sock sofa soup spade spider sponge spoon spring square squirrel
    stair star stone stove straw street sugar suit summer sun swan sweater sword table tail tea tent thread throne thumb tiger toast
    tomato tooth torch towel tower town toy train tray tree truck trumpet tulip tunnel turkey turtle umbrella valley van vase vest
    village violin wagon wall wallet walnut water wave wheel whale wheat whistle willow wind window wing winter wolf wood wool worm
    yarn zebra zipper
    """.split()
)
"""Common things. Lists to sort and to count are made of them."""

OTHER_WORDS = tuple(
    """
    above across actor admit adult advice afraid again agree alarm album alone amount angry answer arrive aside asleep august author
    avoid awake badly before begin behind belong better beyond bitter blame blend bless blind block bloom borrow bother bottom brain
    brave breath bright bring broken brown bubble build busy calm careful carry catch cause center change cheap choose circle clean
    clear clever climb close coast color common cool corner cough count couple course cover crash cream cross crowd cruel curious
    damage dance danger dark dawn decide deep defend delay deny depth design detail differ dinner direct dirty double doubt dream
    drift drive early earn earth easy effort either empty enemy energy enjoy enough equal escape even exact expect extra fade fail
    fair faith family famous fancy fast father favor fear feel fellow fetch fever fight figure final find finish firm first flat float
    flow focus fold follow forest forget form forward free fresh friend front full funny future gather gentle giant gift glad globe
    grade grand gray great green grow guard guess guest guide happy harm hard heal hear heavy help hidden high history hobby hold hollow
    home honest hope hotel hour huge human humble hungry hunt hurry idea image inside invite jump just keen keep kind knock know large
    last late laugh lazy learn leave left lesson level lift linger listen little lively local lonely long loose loud lovely lower
    lucky lunch magic major manage many march market master matter maybe mean melt member memory merry metal method middle mild mind
    minute model moment month moral morning mother motion mount move music narrow nation nature near neat never noble noise normal
    north notice number obey object offer often older open order other outside over owner pace page pain pair pale partly pass past
    patient pause peace people perfect person pick piece pilot place plain plan play please plenty poem point polite poor power praise
    pretty price pride print prize proof proud public pull pure push quick quiet quite quote race raise rapid rare reach read ready real
    reason record relax remain remind reply rescue rest result return reward rich ride right ripe rise rough round royal rule rush sad
    safe salty same save scare scene search season second secret select sense serve seven shade shadow shake shape share sharp shine
    short shout show shy sick side sign silent simple single sister skill sleep slice slide slow small smart smell smile smooth soft
    solid solve song sorry sort sound south space speak special speech speed spend spirit split sport spread stable stage stand start
    state stay steady steam steel steep still stop storm story strange stream strong study stupid style sudden supper supply sure sweet
    swift swim symbol talk tall taste teach team tell tender test thank theme thick thief thin think thirsty thunder ticket tidy tight
    time tiny tired title today together tone topic total touch tough trace trade travel treat trick trip trust truth turn twice twist
    under unit until upper urgent useful usual value vast very victory view visit voice wait wake walk warm warn wash waste watch weak
    wealth wear weather week weight west wet wide wild win wise wish wonder word work world worry worth wrong year yellow young youth
    """.split()
)

LONGER_WORDS = tuple(
    """
    adventure airplane alphabet avocado beautiful blueberry broccoli butterfly calendar champion chocolate computer crocodile dangerous
    daughter december dinosaur dolphin elephant everything february flamingo friendly grandma hamburger happiness hospital internet
    kangaroo keyboard language mountain november october paragraph pineapple president question raspberry restaurant saturday
    september something strawberry sunflower telephone television thursday tomorrow universe vegetable wednesday wonderful yesterday
    """.split()
)


def _words_of_texts() -> tuple[str, ...]:
    """The words that the skills' own texts are made of. Many are one token, whose letters the model must have seen."""
    texts = [path.read_text("utf-8") for path in sorted((Path(__file__).parent / "skills").glob("*.toml"))]
    return tuple(dict.fromkeys(word for text in texts for word in re.findall(r"(?<![\w{])[a-z]{3,10}(?![\w}])", text)))


SHORT_WORDS = tuple(
    dict.fromkeys(word for word in NOUNS + OTHER_WORDS + LONGER_WORDS + _words_of_texts() if 3 <= len(word) <= 10)
)
"""What is spelled, reversed and counted: three to ten letters."""

NAMES = tuple(
    """
    Ada Alan Alice Amir Anna Anton Ava Bela Ben Bianca Boris Carla Carlos Celia Chen Clara Daniel David Diana Dora Edgar Elena Eli Elsa
    Emil Emma Erik Eva Felix Fiona Frank Freya George Grace Greta Hana Hannah Hugo Ida Igor Ines Ingrid Iris Ivan Jack Jana Jonas Julia
    Kai Karim Karl Kate Lara Lena Leo Li Liam Lina Lisa Lola Lucas Lucy Maria Marta Martin Max Maya Mia Milan Mina Mira Nadia Nils Nina
    Noah Nora Olga Oliver Omar Oscar Otto Paul Paula Pedro Peter Petra Pia Quinn Rafael Ravi Rita Robin Rosa Ruth Sam Samira Sara Sofia
    Stefan Tara Theo Thomas Tim Tina Tom Uma Vera Victor Wei Wendy Yara Yusuf Zoe
    """.split()
)

CITIES = tuple(
    """
    Amsterdam Athens Atlanta Austin Barcelona Beijing Berlin Bogota Boston Brussels Budapest Cairo Casablanca Chicago Copenhagen Dallas
    Delhi Denver Dublin Florence Geneva Hamburg Hanoi Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Madrid Manila Melbourne
    Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo Paris Perth Porto Prague Quito Riga Rome Santiago Seattle Seoul
    Shanghai Singapore Sofia Stockholm Sydney Tallinn Tokyo Toronto Tunis Turin Venice Vienna Vilnius Warsaw Zurich
    """.split()
)

COLORS = tuple("black blue brown gold gray green orange pink purple red silver white yellow".split())
FOODS = tuple("bread cake cheese chocolate noodles pancakes pasta pizza rice salad soup sushi tacos".split())
JOBS = tuple(
    "baker carpenter dentist doctor driver engineer farmer gardener lawyer nurse painter pilot sailor teacher writer".split()
)
ANIMALS = tuple(
    "badger bear beaver cat crow deer dog dragon duck eagle fox frog goat hare hedgehog horse lion mouse otter"
    " owl panda parrot"
    " penguin pony rabbit raven sheep squirrel swan tiger turtle wolf".split()
)

_ONSETS = tuple(
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sk sl sn sp st t th tr v w z".split()
)
_VOWELS = tuple("a a a e e e i i o o u u ai ea ee oo ou".split())
_CODAS = ("", "", "", "", *"b ck d g l ll m n n nd nt p r r rd rk rm s sh st t th x".split())


def invent_word(rng: random.Random, shortest: int = 3, longest: int = 10) -> str:
    """A pronounceable word of `shortest` to `longest` letters, most of them in no dictionary."""
    while True:
        word = "".join(
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 3)))
        )
        if shortest <= len(word) <= longest:
            return word


def invent_name(rng: random.Random) -> str:
    return invent_word(rng).capitalize()


def pick_name(rng: random.Random) -> str:
    """A first name; half of them invented, so that names are copied and not only recalled."""
    return rng.choice(NAMES) if rng.random() < 0.5 else invent_name(rng)


def pick_city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.6 else invent_name(rng)


def pick_number(rng: random.Random, most_digits: int = 3) -> int:
    """Every length is as likely as the others."""
    digits = rng.randint(1, most_digits)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
