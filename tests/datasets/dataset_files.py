"""Tiny files in the layouts of public data sets, for the tests of this folder. Every value is made up."""


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        data = text if isinstance(text, bytes) else text.encode()
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


GENRES_19 = "0|0|0|1|1|1|0|0|0|0|0|0|0|0|0|0|0|0|0"


def ml_100k(folder):
    return write(
        folder,
        u__data="7\t2\t3\t881250949\n7\t1\t5\t881250949\n9\t1\t4\t881250900\n",
        u__item=(f"1|Toy Story (1995)|01-Jan-1995||http://x/a?b|{GENRES_19}\n"
                 f"2|Misérables, Les (1995)|||http://x|{GENRES_19.replace('1', '0')}\n"
                 f"3|unknown||||1|{GENRES_19[2:].replace('1', '0')}\n").encode("latin-1"),
        u__user="7|24|M|technician|85711\n9|53|F|other|T8H1N\n",
    )


def ml_1m(folder):
    return write(
        folder,
        ratings__dat="1::1193::5::978300760\r\n1::661::3::978302109\r\n2::661::4::978300760\r\n",
        movies__dat=("661::James and the Giant Peach: a film (1996)::Animation|Children's\n"
                     "1193::Misérables, Les (1995)::Drama\n").encode("latin-1"),
        users__dat="1::F::1::10::48067\n2::M::56::16::70072\n",
    )


def atomic_1m(folder):
    return write(
        folder,
        ml_1m__inter="user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
                     "1m_2\tHeat (1995)\t5\t978300760\n1m_2\tCinéma \"Paradiso\" (1988)\t4.5\t978300760.5\n"
                     "1m_10\tHeat (1995)\t1\t978300761\n",
        ml_1m__item="item_id:token\tmovie_title:token\trelease_year:float\tgenre:token\n"
                    "Cinéma \"Paradiso\" (1988)\tCinéma \"Paradiso\"\t1988\tDrama\n"
                    "Unseen (1990)\tUnseen\t\t\nHeat (1995)\tHeat\t1995\tAction Crime Thriller\n",
        ml_1m__user="user_id:token\tage:float\tgender:token\toccupation:float\tzip_code:token\n"
                    "1m_2\t56\tM\t16\t70072\n1m_10\t1\tF\t10\t48067\n",
    )


KUAIRAND_HEAD = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab\n")


def kuairand_log(*rows):
    """rows of user, video, time_ms, is_click, is_rand, tab"""
    return KUAIRAND_HEAD + "".join(
        f"{u},{v},20220408,1600,{t},{c},0,0,0,0,0,{c},{1000 * c},9000,0,0,0,{r},{tab}\n" for u, v, t, c, r, tab in rows)


def kuairand(folder, ending="pure", parts=("",)):
    data = folder / "KuaiRand-Pure" / "data"
    data.mkdir(parents=True)
    for part in parts:
        (data / f"log_standard_4_08_to_4_21_{ending}{part}.csv").write_text(
            kuairand_log((0, 5, 1649404800000, 1, 0, 1), (0, 6, 1649404800000, 0, 0, 1),
                         (1, 5, 1649404800001, 0, 0, 0)))
    (data / f"log_standard_4_22_to_5_08_{ending}.csv").write_text(kuairand_log((0, 7, 1650600000000, 0, 0, 4)))
    (data / f"log_random_4_22_to_5_08_{ending}.csv").write_text(kuairand_log((0, 8, 1650600000500, 1, 1, 1)))
    (data / f"user_features_{ending}.csv").write_text(
        "user_id,user_active_degree,follow_user_num,onehot_feat0\n0,full_active,5,0\n1,UNKNOWN,0,\n")
    (data / f"video_features_basic_{ending}.csv").write_text(
        "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,server_width,"
        "server_height,music_id,music_type,tag\n"
        '5,50,NORMAL,2022-04-01,Short,public,9000.0,720.0,1280.0,33,9,"12,65"\n6,51,AD,,,,,,,,,\n')
    (data / f"video_features_statistic_{ending}.csv").write_text("video_id,counts\n5,1000\n")
    return folder
