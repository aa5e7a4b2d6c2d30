"""Messages of the service in the web UI: quoted code, which the service marks with backticks."""

from __future__ import annotations

import json

import pytest
from browsing import OpenPage
from live import LiveServer
from playwright.sync_api import Page, Route, expect

# Markup in a message must not become elements.
MESSAGE = "The key is missing in `access.<b>admins</b>` of <i>a`b</i>.\n`x\ny`"
EXPECTED = (["access.<b>admins</b>"], "The key is missing in access.<b>admins</b> of <i>a`b</i>.\n`x\ny`")


# Code that creates an element with a message, by module.
CREATORS = {
    "core/elements.js": "module.formatMessage(new Error(message))",
    "result/notes.js": "module.createNotes({ doubt: null, warnings: [message], parameters: {} }, [], null)",
    "result/missing_result.js": "module.createFailureExplanation({ state: 'failed', problem: { detail: message } })",
    "stack/guidance.js": "module.createUnreadableStackExplanation({ slug: '', message })",
    "gallery/trial_view.js": "(view => { view.fail(message); return view.text; })(new module.TrialView('a'))",
    "core/error_bar.js": "(module.showError(new Error(message)), document.querySelector('#problem span'))",
}


@pytest.mark.parametrize("module", CREATORS)
def test_text_in_backticks_is_shown_as_code(module_page: Page, module: str) -> None:
    codes, text, markup_count = module_page.evaluate(
        f"""async message => {{
          const module = await import("/page/{module}");
          const content = {CREATORS[module]};
          const codes = [...content.querySelectorAll("code")].map(code => code.textContent);
          return [codes, content.textContent, content.querySelectorAll("b, i").length];
        }}""",
        MESSAGE,
    )
    module_page.evaluate("async () => (await import('/page/core/error_bar.js')).hideError()")
    assert markup_count == 0
    assert codes == EXPECTED[0]
    assert EXPECTED[1] in text


def test_message_about_an_unreadable_stack_is_translated_once(module_page: Page) -> None:
    # A second translation would add one to the numbers again.
    text = module_page.evaluate("""async () => {
      const { Problem } = await import("/page/core/requests.js");
      const { createUnreadableStackExplanation } = await import("/page/stack/guidance.js");
      const detail = "The file has no scene 7. It has 2 scenes: 0 (a), 1.";
      return createUnreadableStackExplanation(new Problem("bad-parameter", detail, 422)).textContent;
    }""")
    assert "The file has no scene 8. It has 2 scenes: 1 (a), 2." in text


def test_code_is_marked_in_the_status_and_the_error_bar(fake: LiveServer, open_page: OpenPage) -> None:
    def fail(route: Route) -> None:
        problem = {"type": "urn:stackseg:forbidden", "detail": "Ask the operator to set `access.admins`."}
        route.fulfill(status=403, content_type="application/problem+json", body=json.dumps(problem))

    page = open_page(fake)
    expect(page.locator("#file")).to_be_attached()
    page.route("**/models/reload", fail)
    page.evaluate("location.hash = 'status'")
    page.get_by_role("button", name="Reload models").click()
    expect(page.locator("#status code")).to_have_text("access.admins")
    page.route("**/projects", fail)
    page.evaluate("location.hash = ''")
    expect(page.locator("#problem code")).to_have_text("access.admins")
    assert "`" not in page.locator("body").inner_text()
