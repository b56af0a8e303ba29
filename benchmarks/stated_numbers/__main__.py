import sys

from benchmarks.stated_numbers import PAGES, ROOT, filled


def main() -> int:
    """Write the pages, or check them."""
    wrong = 0
    for page in PAGES:
        before = page.read_text()
        if (after := filled(before)) != before:
            wrong += 1
            print(page.relative_to(ROOT), "is not as the newest results have it")
            if "--check" not in sys.argv:
                page.write_text(after)
    return 1 if wrong and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
