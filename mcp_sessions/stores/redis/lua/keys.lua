-- Request keys: what core/request_keys.py decides, in the step that stores it. The same
-- tests run on both.
--
-- A key is a field of the hash :q (packed) and, once its request has finished, a member of
-- the sorted set :qf, in the order of finishing. Its kept answer is the field `a:<key>` of :q,
-- and then it is a member of :qa too. qb and qa of the session's hash count bytes: all, and
-- those of answers; qn counts what finished.

local entries, finished, answered

-- Those of the session that the script is at.
local function open_keys(max_bytes, lifetime)
    entries, finished, answered = base .. ':q', base .. ':qf', base .. ':qa'
    local counts = redis.call('HMGET', base, 'qb', 'qa', 'qn')
    local all = {
        bytes = tonumber(counts[1] or 0), answers = tonumber(counts[2] or 0),
        finished = tonumber(counts[3] or 0),
        max_bytes = tonumber(max_bytes), lifetime = tonumber(lifetime),
    }
    local counted = 0
    for _, name in ipairs({ 'bytes', 'answers', 'finished' }) do
        counted = counted + (all[name] > 0 and 1 or 0)
    end
    if redis.call('EXISTS', entries, finished, answered) < counted then
        -- Else a request whose key was lost would run again (KEY3).
        error('a part of the request keys is gone')
    end
    return all
end

local function save_keys(all)
    redis.call('HSET', base, 'qb', whole(all.bytes), 'qa', whole(all.answers),
        'qn', whole(all.finished))
end

local function get_key(key)
    local packed = redis.call('HGET', entries, 'k:' .. key)
    return packed and cmsgpack.unpack(packed)
end

local function put_key(key, entry)
    redis.call('HSET', entries, 'k:' .. key, cmsgpack.pack(entry))
end

local function expire_keys(all, now)
    while true do
        local key = redis.call('ZRANGE', finished, 0, 0)[1]
        if not key then
            -- Nothing finished is left: the counter begins anew.
            all.finished = 0
            return
        end
        local entry = get_key(key)
        if entry.at >= now - all.lifetime then
            return
        end
        redis.call('HDEL', entries, 'k:' .. key, 'a:' .. key)
        redis.call('ZREM', finished, key)
        redis.call('ZREM', answered, key)
        all.bytes = all.bytes - entry.cost - entry.kept
        all.answers = all.answers - entry.kept
    end
end

local function make_room(all, wanted)
    if all.bytes + wanted <= all.max_bytes then
        return true
    end
    if all.bytes - all.answers + wanted > all.max_bytes then
        -- It will not fit, whatever goes: then nothing has to go (KEY12, KEY13).
        return false
    end
    while all.bytes + wanted > all.max_bytes do
        local key = redis.call('ZRANGE', answered, 0, 0)[1]
        local entry = get_key(key)
        redis.call('HDEL', entries, 'a:' .. key)
        redis.call('ZREM', answered, key)
        all.bytes, all.answers = all.bytes - entry.kept, all.answers - entry.kept
        entry.state, entry.kept = 'dropped', 0
        put_key(key, entry)
    end
    return true
end

-- Whether those scopes (JSON) hold all of the others.
local function has_scopes(scopes, others)
    local known = {}
    for _, scope in ipairs(cjson.decode(scopes)) do
        known[scope] = true
    end
    for _, scope in ipairs(cjson.decode(others)) do
        if not known[scope] then
            return false
        end
    end
    return true
end

-- A known key never runs again (KEY3), and with other content is refused (KEY8).
-- What was found, and the entry and the answer if the key is known. A key that the run
-- instead_of recorded, which began nothing, is recorded anew.
local function begin_key(all, key, cost, digest, runner, scopes, now, run, instead_of)
    expire_keys(all, now)
    local known = get_key(key)
    local found = 'full'
    local answer = false
    if known then
        found = known.digest == digest and known.state or 'other_content'
        answer = found == 'answered' and redis.call('HGET', entries, 'a:' .. key)
        if found == 'answered' and not answer then
            error('a kept answer is gone')
        end
        -- A caller without a scope of the first sending gets no answer, and begins nothing (SEC3).
        if found == 'running' and instead_of ~= '' and known.run == instead_of
            and has_scopes(scopes, known.scopes) then
            found = 'first'
            known.runner, known.run, known.at, known.scopes = runner, run, now, scopes
            put_key(key, known)
        end
    elseif redis.call('ZSCORE', finished, key) then
        error('the record of a request key is gone')
    elseif make_room(all, cost) then
        found = 'first'
        known = {
            digest = digest, runner = runner, at = now, state = 'running', scopes = scopes,
            run = run, cost = cost, kept = 0,
        }
        put_key(key, known)
        share_lifetime(entries)
        all.bytes = all.bytes + cost
    end
    save_keys(all)
    return found, known, answer
end

-- Whether the answer was kept.
local function finish_key(all, key, has_answer, answer, now)
    expire_keys(all, now)
    local entry = get_key(key)
    local is_kept = false
    if entry and entry.state == 'running' then
        entry.at = now
        all.finished = all.finished + 1
        redis.call('ZADD', finished, all.finished, key)
        is_kept = has_answer and make_room(all, #answer)
        entry.state = is_kept and 'answered' or 'dropped'
        if is_kept then
            entry.kept = #answer
            all.bytes, all.answers = all.bytes + #answer, all.answers + #answer
            redis.call('HSET', entries, 'a:' .. key, answer)
            redis.call('ZADD', answered, all.finished, key)
            share_lifetime(answered)
        end
        put_key(key, entry)
        share_lifetime(finished)
    end
    save_keys(all)
    return is_kept
end
