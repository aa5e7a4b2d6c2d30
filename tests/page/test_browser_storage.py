from __future__ import annotations

import pytest
from playwright.sync_api import Page


@pytest.mark.parametrize("stored", ['{"length": 1}', "null", "[1", "3"])
def test_damaged_lists_are_empty(module_page: Page, stored: str) -> None:
    script = """async stored => {
      const { loadList, loadValue, saveValue } = await import("/page/core/browser_storage.js");
      saveValue("sessionStorage", "damaged", stored);
      saveValue("localStorage", "damaged", stored);
      const result = [loadList("damaged"), loadValue("sessionStorage", "damaged"), loadList("missing")];
      for (const storage of [localStorage, sessionStorage]) storage.removeItem("damaged");
      return result;
    }"""
    assert module_page.evaluate(script, stored) == [[], stored, []]
