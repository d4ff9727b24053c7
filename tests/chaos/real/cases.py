from tests.chaos.real.orders import Order
from tests.chaos.real.stage import LONG_S, SHORT_S

CASES = [
    [Order("contributor", "SIGSTOP", "while contributing", SHORT_S)],
    [Order("contributor", "SIGSTOP", "before contributing", LONG_S)],
    [Order("owner", "SIGSTOP", "while reducing", SHORT_S)],
    [Order("owner", "SIGSTOP", "some have the result", LONG_S)],
    [Order("coordinator", "SIGSTOP", "while contributing", SHORT_S)],
    [Order("coordinator", "SIGSTOP", "before the verdict is announced", LONG_S)],
]
