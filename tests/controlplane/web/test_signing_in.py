import pytest
from django.urls import get_resolver

PAGES = ("/policies/", "/fleet/", "/routers/", "/task-groups/")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_sends_a_stranger_to_the_sign_in_page_and_back(client, db, path):
    answer = client.get(path)

    assert answer.status_code == 302
    assert answer["Location"] == f"/accounts/login/?next={path}"


def test_signing_in_leads_back_to_where_one_came_from(client, operator):
    form = {"login": "olga", "password": "a long enough password"}

    answer = client.post("/accounts/login/?next=/fleet/", form)

    assert (answer.status_code, answer["Location"]) == (302, "/fleet/")


def test_there_is_no_sign_up_and_no_mail_flow():
    names = {name for name in get_resolver().reverse_dict if isinstance(name, str) and name.startswith("account_")}

    known = {"login", "logout", "inactive", "change_password", "set_password", "reauthenticate"}
    assert names == {f"account_{name}" for name in known}


def test_signing_out_takes_a_post_so_that_no_link_can_do_it(visitor):
    visitor.get("/accounts/logout/")
    assert "_auth_user_id" in visitor.session

    visitor.post("/accounts/logout/")
    assert "_auth_user_id" not in visitor.session


def test_a_page_that_is_not_there_says_so_in_our_words(visitor):
    answer = visitor.get("/no-such-page/")

    assert answer.status_code == 404
    assert "Page not found" in answer.text
