"""Draws the pictures of docs/concepts.md, in English and in Chinese.

    python tests/pictures.py        # writes docs/pictures/*.svg

Each picture has a light background of its own, so it can be read on light and on dark pages. A test
compares the files with what is drawn here.
"""

# ruff: noqa: RUF001 - Chinese punctuation is meant

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs/pictures"

INK, FAINT, PAPER = "#1f2937", "#6b7280", "#f8fafc"
BLUE, GREEN, AMBER, RED, PLAIN = "#dbeafe", "#dcfce7", "#fef3c7", "#fee2e2", "#ffffff"

CHINESE = {
    "States of a term": "任期的状态",
    "elected": "当选",
    "a renewal failed": "一次续约失败",
    "a renewal was confirmed": "续约得到确认",
    "the deadline passed,": "到达截止时间，",
    "or the lease is gone": "或租约已不存在",
    "the body ended": "任务结束",
    "term.valid is true": "term.valid 为真",
    "term.valid is false": "term.valid 为假",
    "A failover": "一次故障切换",
    "store": "存储",
    "renew": "续约",
    "confirmed": "确认",
    "frozen": "被冻结",
    "valid_until: it may no longer": "valid_until：此后不再",
    "rely on being leader": "可以认为自己是领导者",
    "stop budget": "停止预算",
    "the lease ends": "租约到期",
    "notified": "收到通知",
    "create the leader record": "创建领导者记录",
    "created: token 8": "创建成功：令牌 8",
    "leads with token 8": "以令牌 8 领导",
    "wakes: term.valid is false": "醒来：term.valid 为假",
    "Fencing": "隔离（fencing）",
    "database": "数据库",
    "checks term.valid: true": "检查 term.valid：真",
    "paused before its write": "写入之前被暂停",
    "write, token 8": "写入，令牌 8",
    "accepted: highest seen 8": "接受：已见最大令牌 8",
    "write, token 7": "写入，令牌 7",
    "refused: 7 is below 8": "拒绝：7 小于 8",
    "elected, token 8": "当选，令牌 8",
    "leads, token 7": "领导，令牌 7",
    "Where candidates meet": "候选者在哪里相遇",
    "One machine": "一台机器",
    "A service you run": "已有的服务",
    "A quorum": "doyen 仲裁集群",
    "Inside your processes": "嵌入你的进程",
    "server1": "server1",
    "process": "进程",
    "host": "主机",
    "node": "节点",
    "an SQLite file": "一个 SQLite 文件",
    "etcd, PostgreSQL, …": "etcd、PostgreSQL 等",
    "three doyen serve": "三个 doyen serve",
    "three doyen.Node": "三个 doyen.Node",
    "sqlite:///app.db": "sqlite:///app.db",
    "etcd://h1,h2,h3": "etcd://h1,h2,h3",
    "doyen://h1,h2,h3": "doyen://h1,h2,h3",
    "node.session()": "node.session()",
}


class Picture:
    """An SVG image that grows by shapes. `say` translates its texts."""

    def __init__(self, title: str, width: int, height: int, say: Callable[[str], str]) -> None:
        self._say = say
        self._shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" font-family="system-ui, sans-serif" font-size="14" fill="{INK}">',
            f"<title>{escape(say(title))}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
            ' markerHeight="8" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def text(
        self, x: float, y: float, words: str, anchor: str = "middle", colour: str = INK, **more: str
    ) -> None:
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}"{extra}>'
            f"{escape(self._say(words))}</text>"
        )

    def box(self, x: float, y: float, wide: float, high: float, words: str, fill: str) -> None:
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="7"'
            f' fill="{fill}" stroke="{INK}"/>'
        )
        if words:
            self.text(x + wide / 2, y + high / 2 + 5, words)

    def path(self, d: str, *, tip: bool = True, dashed: bool = False, colour: str = INK) -> None:
        end = ' marker-end="url(#tip)"' if tip else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._shapes.append(f'<path d="{d}" fill="none" stroke="{colour}"{dash}{end}/>')

    def bar(self, x: float, top: float, bottom: float, fill: str) -> None:
        self._shapes.append(
            f'<rect x="{x - 7:g}" y="{top:g}" width="14" height="{bottom - top:g}"'
            f' fill="{fill}" stroke="{INK}"/>'
        )

    def lifelines(self, bottom: float, **places: float) -> None:
        """The participants of a sequence, and their lines through time."""
        for name, x in places.items():
            self.box(x - 60, 16, 120, 32, name, PLAIN)
            self.path(f"M{x:g} 48V{bottom:g}", tip=False, dashed=True, colour=FAINT)

    def message(self, y: float, start: float, end: float, words: str, dashed: bool = False) -> None:
        gap = 8 if end > start else -8
        self.path(f"M{start + gap:g} {y:g}H{end - gap:g}", dashed=dashed)
        self.text((start + end) / 2, y - 6, words, font_size="13")

    def svg(self) -> str:
        return "\n".join([*self._shapes, "</svg>", ""])


def term_states(say: Callable[[str], str]) -> str:
    picture = Picture("States of a term", 860, 300, say)
    picture.box(20, 22, 520, 256, "", GREEN)
    picture.text(280, 266, "term.valid is true", colour=FAINT)
    picture.box(600, 22, 240, 256, "", RED)
    picture.text(720, 266, "term.valid is false", colour=FAINT)
    picture.box(170, 60, 140, 44, "leader", PLAIN)
    picture.box(170, 190, 140, 44, "unsure", AMBER)
    picture.box(650, 60, 140, 44, "ended", PLAIN)
    picture.box(650, 190, 140, 44, "lost", PLAIN)
    picture.path("M50 82H168")
    picture.text(104, 74, "elected", font_size="13")
    picture.path("M210 104V188")
    picture.text(202, 151, "a renewal failed", "end", font_size="13")
    picture.path("M272 190V106")
    picture.text(280, 151, "a renewal was confirmed", "start", font_size="13")
    picture.path("M310 75H648")
    picture.text(430, 67, "the body ended", font_size="13")
    picture.path("M310 92C460 98 560 130 656 188")
    picture.path("M310 212H648")
    picture.text(334, 204, "the deadline passed,", "start", font_size="13")
    picture.text(334, 230, "or the lease is gone", "start", font_size="13")
    return picture.svg()


def failover(say: Callable[[str], str]) -> str:
    picture = Picture("A failover", 820, 470, say)
    one, store, two = 230.0, 470.0, 710.0
    picture.lifelines(455, server1=one, store=store, server2=two)
    picture.bar(one, 70, 270, GREEN)
    picture.bar(one, 270, 320, AMBER)
    picture.message(90, one, store, "renew")
    picture.message(115, store, one, "confirmed", dashed=True)
    picture.text(one - 16, 158, "frozen", "end", colour="#b91c1c")
    picture.path(f"M{one - 10:g} 165H{one + 10:g}", tip=False, colour="#b91c1c")
    picture.text(one - 16, 266, "valid_until: it may no longer", "end", font_size="13")
    picture.text(one - 16, 284, "rely on being leader", "end", font_size="13")
    picture.text(one - 16, 312, "stop budget", "end", colour=FAINT, font_size="13")
    picture.path(f"M{store - 10:g} 336H{store + 10:g}", tip=False)
    picture.text(store - 16, 341, "the lease ends", "end")
    picture.message(352, store, two, "notified")
    picture.message(382, two, store, "create the leader record")
    picture.message(412, store, two, "created: token 8", dashed=True)
    picture.bar(two, 412, 455, GREEN)
    picture.text(two + 14, 442, "token 8", "start", font_size="13")
    picture.text(one - 16, 430, "wakes: term.valid is false", "end", colour="#b91c1c")
    picture.path(f"M{one - 10:g} 425H{one + 10:g}", tip=False, colour="#b91c1c")
    return picture.svg()


def fencing(say: Callable[[str], str]) -> str:
    picture = Picture("Fencing", 820, 360, say)
    one, database, two = 230.0, 470.0, 710.0
    picture.lifelines(345, server1=one, database=database, server2=two)
    picture.bar(one, 66, 150, GREEN)
    picture.text(one - 16, 84, "leads, token 7", "end")
    picture.text(one - 16, 110, "checks term.valid: true", "end")
    picture.text(one - 16, 146, "paused before its write", "end", colour="#b91c1c")
    picture.path(f"M{one:g} 150V290", tip=False, dashed=True, colour="#b91c1c")
    picture.bar(two, 180, 345, GREEN)
    picture.text(two - 16, 184, "elected, token 8", "end")
    picture.message(220, two, database, "write, token 8")
    picture.message(248, database, two, "accepted: highest seen 8", dashed=True)
    picture.message(292, one, database, "write, token 7")
    picture.message(322, database, one, "refused: 7 is below 8", dashed=True)
    return picture.svg()


def topologies(say: Callable[[str], str]) -> str:
    picture = Picture("Where candidates meet", 820, 300, say)
    panels = (
        ("One machine", "process", "an SQLite file", "sqlite:///app.db", 1),
        ("A service you run", "host", "etcd, PostgreSQL, …", "etcd://h1,h2,h3", 1),
        ("A quorum", "host", "three doyen serve", "doyen://h1,h2,h3", 3),
        ("Inside your processes", "host", "three doyen.Node", "node.session()", 0),
    )
    for index, (title, unit, store, url, servers) in enumerate(panels):
        left = 20 + index * 198
        picture.box(left, 20, 186, 260, "", PLAIN)
        picture.text(left + 93, 44, title, font_weight="bold")
        for number in range(3):
            x = left + 8 + number * 58
            picture.box(x, 66, 54, 74 if servers == 0 else 34, "", BLUE)
            picture.text(x + 27, 87, unit, font_size="12")
            if servers == 0:
                picture.box(x + 5, 104, 44, 28, "", GREEN)
                picture.text(x + 27, 122, "node", font_size="12")
            else:
                target = x + 27 if servers == 3 else left + 93
                picture.path(f"M{x + 27:g} 100L{target:g} 168")
            if servers == 3:
                picture.box(x, 170, 54, 34, "", GREEN)
                picture.text(x + 27, 192, "node", font_size="13")
        if servers == 1:
            picture.box(left + 19, 170, 148, 34, "", GREEN)
        between = (
            f"M{left + 62:g} 187h4M{left + 120:g} 187h4"
            if servers
            else f"M{left + 57:g} 118h14M{left + 115:g} 118h14"
        )
        if servers != 1:
            picture.path(between, tip=False)
        picture.text(left + 93, 191 if servers == 1 else 234, store, font_size="13")
        picture.text(left + 93, 260, url, font_size="12", font_family="ui-monospace, monospace")
    return picture.svg()


PICTURES = {
    "term-states": term_states,
    "failover": failover,
    "fencing": fencing,
    "topologies": topologies,
}


def files() -> dict[Path, str]:
    """Every picture in both languages, by its file."""
    drawn = {}
    for name, draw in PICTURES.items():
        drawn[FOLDER / f"{name}.svg"] = draw(str)
        drawn[FOLDER / f"{name}.zh.svg"] = draw(lambda words: CHINESE.get(words, words))
    return drawn


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
